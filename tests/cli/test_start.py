"""Start-up: help at once, plans without torch and transformers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmoffload.profiler.store import save_profile
from tests.cli.conftest import Call
from tests.cli.machines import machine

HEAVY = ("torch", "transformers", "numpy", "scipy", "pydantic", "pulp", "llvmlite", "rich.progress")


def _seconds(command: list[str]) -> float:
    """Best of three, since others may use the machine; a program that waits for nothing takes its processor time where they do."""
    best = float("inf")
    for _ in range(3):
        wall, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        processor = after.children_user - before.children_user + after.children_system - before.children_system
        best = min(best, time.perf_counter() - wall, processor)
    return best


def test_help_within_half_a_second() -> None:
    assert _seconds([sys.executable, "-m", "lmoffload", "--help"]) < 0.5


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from lmoffload.cli.main import main; main(['--help'])\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    for command in ("profile", "inspect", "plan", "explain", "run", "quality", "make-dummy", "doctor", "demo"):
        assert f" {command} " in done.stdout


def test_plan_of_80_layers_within_two_seconds_without_torch(tmp_path: Path) -> None:
    profile = tmp_path / "machine.json"
    save_profile(machine(memory_bytes=64 * 2**30), profile)
    plan = ["plan", "shape:llama-2-70b", "--machine", str(profile), "--host-memory", "32GiB", "--json"]
    code = (
        "import sys; from lmoffload.cli.main import main\n"
        f"code = main({plan!r})\n"
        "print(code, [m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1] == "0 []"
    document = json.loads(done.stdout)
    assert document["status"] == "optimal"
    assert len({name.split(".")[2] for name in document["weights"]["tensors"] if ".layers." in name}) == 80
    assert _seconds([sys.executable, "-m", "lmoffload", *plan]) < 2.0


def test_no_argument_shows_the_help(call: Call) -> None:
    shown = call()
    assert shown.code == 0
    assert "Usage" in shown.out


def test_version(call: Call) -> None:
    import lmoffload

    assert call("--version").out == f"lmoffload {lmoffload.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run"], "Missing argument 'MODEL'"),
        (["run", "m", "--top-k", "x"], "'--top-k'"),
        (["run", "m", "--nope"], "No such option"),
        (["pln"], "No such command 'pln'"),
    ],
)
def test_wrong_usage_is_one_sentence(call: Call, arguments: list[str], word: str) -> None:
    shown = call(*arguments)
    assert shown.code == 2
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert word in shown.err
    assert "--help`." in shown.err


def test_debug_shows_where(call: Call, home: Path) -> None:
    quiet = call("inspect", "nowhere")
    assert quiet.code == 1
    assert "Traceback" not in quiet.err
    for arguments in (["--debug", "inspect", "nowhere"], ["inspect", "nowhere", "--debug"]):
        assert "Traceback" in call(*arguments).err


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m lmoffload inspect shape:llama-2-70b --json"
    done = subprocess.run(["bash", "-c", f"{command} | head -c 10"], capture_output=True, text=True, env=os.environ, check=True)
    assert "Traceback" not in done.stderr


def test_closed_streams(home: Path) -> None:
    """A result that nobody can receive is an error in one sentence; remarks that nobody can receive are none."""
    save_profile(machine(memory_bytes=2**40), Path("big.json"))
    command = f"{shlex.quote(sys.executable)} -m lmoffload plan shape:opt-1.3b --machine big.json --json"
    lost = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (lost.returncode, len(lost.stderr.splitlines())) == (1, 1), lost.stderr
    assert "Bad file descriptor" in lost.stderr
    silent = subprocess.run(["sh", "-c", f"{command} <&- 2>&-"], stdout=subprocess.PIPE, text=True, check=False)
    assert silent.returncode == 0
    assert json.loads(silent.stdout)["status"] == "optimal"


def test_completion_of_commands_and_options() -> None:
    """As a shell asks for it."""
    for words, at, expected in (("lmoffload ru", 1, "run"), ("lmoffload run model --outp", 3, "--output")):
        asked = os.environ | {"_LMOFFLOAD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        program = "import sys; sys.argv = ['lmoffload']; from lmoffload.cli.main import main; main()"
        done = subprocess.run([sys.executable, "-c", program], env=asked, check=False, capture_output=True, text=True)
        assert done.stdout.split() == [expected], done.stderr
