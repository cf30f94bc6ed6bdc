"""Damaged inputs: whatever is wrong in a file, the program ends soon, with a sentence, and leaves no half-written file.

More of them: python -m pytest tests/cli/test_mutations.py --mutations 300
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmoffload.cli.main import main
from tests.cli.machines import machine
from tests.models import tiny_gguf

MOST_S = 30
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 64, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"),
    "", "a", "../../x", "\x00", "é" * 300, "host", "disk", "device", "fp32", "int8", [], {}, [[]], [None], {"a": 1}, [0] * 50,
)  # fmt: skip
KINDS = ("safetensors", "gguf", "config", "tokenizer", "generation", "plan", "explained", "profile", "profile_run", "job")


@pytest.fixture(scope="module")
def originals(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound inputs of every kind, and a home, in one folder."""
    place = tmp_path_factory.mktemp("mutations")
    shutil.copytree(model, place / "model")
    tiny_gguf("llama", place / "model.gguf", num_layers=1)
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 5, "eos_token_id": [1]}
    (place / "model" / "generation_config.json").write_text(json.dumps(generation))
    (place / "machine.json").write_text(machine().model_dump_json())
    lines = [
        {"id": "a", "prompt": "One two"},
        {"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 3, "temperature": 0.5, "seed": 3},
        {"prompt": "x", "stop": ["y", "z"]},
    ]
    (place / "job.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    home = place / "home"
    with _surroundings(place, home), pytest.MonkeyPatch.context() as patch:
        _isolate(patch, home)
        work = ["--num-prompts", "2", "--prompt-len", "8", "--gen-len", "2"]
        assert main(["plan", "model", "--machine", "machine.json", *work, "--out", "plan.json"]) == 0
    return place


def test_damaged_inputs(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    _isolate(monkeypatch, tmp_path / "home")
    number = iter(range(10**9))

    @settings(
        max_examples=request.config.getoption("--mutations"), deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))
    def check(kind: str, seed: int) -> None:
        place = tmp_path / str(next(number))
        _check(originals, place, kind, random.Random(seed), capsys)
        shutil.rmtree(place)

    check()


def _check(originals: Path, place: Path, kind: str, chance: random.Random, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(originals, place)
    arguments, damaged, output = _call(kind, place)
    DAMAGE.get(kind, _damage_json)(place / damaged, chance)
    before = {path for path in place.rglob("*") if path.is_file()}
    with _surroundings(place, place), _alarm():
        code = main(arguments)
    shown = capsys.readouterr()
    told = f"{kind}: {arguments} gave {code}: {shown.err}"
    assert code in (0, 1, 2, 3), told
    assert "Traceback" not in shown.err and "unexpectedly" not in shown.err, told
    if code and not shown.out:
        assert shown.err.strip(), told
    left = {path.name for path in place.rglob("*") if path.is_file()} - {path.name for path in before}
    assert not {name for name in left if name.endswith(".part") or name.startswith(".")}, (told, left)
    if output is not None and (place / output).exists():
        text = (place / output).read_text(encoding="utf-8")
        assert text.endswith("\n"), told
        for document in [text] if output.endswith(".json") else text.splitlines():
            json.loads(document)


def _call(kind: str, place: Path) -> tuple[list[str], str, str | None]:
    """(arguments, the file to damage, the file that may be written)."""
    on = ["--machine", "machine.json"]
    job = ["--input", "job.jsonl", "--output", "out.jsonl", "--gen-len", "2"]
    file = next((place / "model").glob("*.safetensors")).name
    return {
        "safetensors": (["plan", "model", *on, "--out", "out.json"], f"model/{file}", "out.json"),
        "gguf": (["plan", "model.gguf", *on, "--out", "out.json"], "model.gguf", "out.json"),
        "config": (["run", "model", *on, *job], "model/config.json", "out.jsonl"),
        "tokenizer": (["run", "model", *on, *job], "model/tokenizer_config.json", "out.jsonl"),
        "generation": (["run", "model", *on, *job], "model/generation_config.json", "out.jsonl"),
        "plan": (["run", "model", *on, "--plan", "plan.json", *job], "plan.json", "out.jsonl"),
        "explained": (["explain", "plan.json"], "plan.json", None),
        "profile": (["plan", "model", *on, "--out", "out.json"], "machine.json", "out.json"),
        "profile_run": (["run", "model", *on, *job], "machine.json", "out.jsonl"),
        "job": (["run", "model", *on, *job], "job.jsonl", "out.jsonl"),
    }[kind]


def _damage_header(path: Path, chance: random.Random) -> None:
    """A few bytes of the header, or the file's end."""
    data = bytearray(path.read_bytes())
    header = min(len(data), 4000)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(header)
        data[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
    if chance.random() < 0.2:
        del data[chance.randrange(len(data)) :]
    path.write_bytes(data)


def _damage_json(path: Path, chance: random.Random) -> None:
    """One or two values of a document, or its text."""
    if chance.random() < 0.2:
        return _damage_header(path, chance)
    document = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(chance.randint(1, 2)):
        document = _change(document, chance)
    path.write_text(json.dumps(document), encoding="utf-8")
    return None


def _damage_lines(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.3:
        return _damage_header(path, chance)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    at = chance.randrange(len(lines))
    lines[at] = _change(lines[at], chance)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return None


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {"safetensors": _damage_header, "gguf": _damage_header, "job": _damage_lines}


def _change(document: Any, chance: random.Random) -> Any:
    """The document with a value somewhere in it replaced, left out or put in."""
    if not isinstance(document, dict | list) or not document or chance.random() < 0.1:
        return chance.choice(ODD)
    key = chance.choice(list(document)) if isinstance(document, dict) else chance.randrange(len(document))
    way = chance.random()
    if way < 0.1:
        del document[key]
    elif way < 0.15 and isinstance(document, dict):
        document[chance.choice(("a", "", "name", "schema"))] = chance.choice(ODD)
    elif isinstance(document[key], int | float) and way < 0.4:
        document[key] = document[key] * chance.choice((-1, 0, 2, 10, 1000, 1e12))
    else:
        document[key] = _change(document[key], chance)
    return document


def _isolate(patch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        patch.setenv(name, str(home / name.lower()))


@contextmanager
def _surroundings(place: Path, home: Path) -> Iterator[None]:
    before = Path.cwd()
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _alarm() -> Iterator[None]:
    """Ends what hangs, past every handler of Exception."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise SystemExit(f"still running after {MOST_S} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
