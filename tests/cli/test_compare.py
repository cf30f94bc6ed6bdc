"""`compare`, with this engine and a real peer, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmoffload.api.comparing import with_disk_rate
from lmoffload.api.limits import cores_of
from lmoffload.errors import UsageError
from tests.bench.comparisons import comparison
from tests.cli.conftest import Call
from tests.cli.machines import machine

WORK = ("--num-prompts", "3", "--prompt-len", "6", "--gen-len", "4")


def test_a_comparison_from_end_to_end(profiled: Path, model: Path, tmp_path: Path) -> None:
    """Accelerate's and this engine's tokens are equal in fp32, and what is not there is a line."""
    out = tmp_path / "out"
    nowhere = tmp_path / "no-python"
    done = subprocess.run(
        [sys.executable, "-m", "lmoffload", "compare", str(model), *WORK, "--against", "accelerate,airllm,flexgen-policy",
         "--peer-python", f"airllm={nowhere}", "--rounds", "1", "--no-sweep", "--keep-cache", "--cut-gen-len", "3",
         "--host-memory", "2GiB", "--disk-rate", "1GB", "--out", str(out), "--json"],
        capture_output=True, text=True, timeout=600, check=False, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    systems = {system["name"]: system for system in document["systems"]}
    assert list(systems) == ["lmoffload", "accelerate", "airllm", "flexgen-policy"]
    for name in ("lmoffload", "accelerate"):
        assert systems[name]["check"]["status"] == "equal", systems[name]
        (run,) = systems[name]["rows"][0]["runs"]
        assert run["status"] == "projected", run
        figures = run["figures"]
        assert figures["tokens_per_s"] == pytest.approx(12 / (figures["prefill_s"] + figures["decode_s"]))
        assert len(figures["step_s"]) == 2 and figures["decode_s"] > sum(figures["step_s"])
        assert run["peak_rss_bytes"] > 100 * 2**20 and run["spans"] and run["memory"]
        if document["granted"]["enforced"]:
            assert 0 < run["peak_memory_bytes"] <= 2 * 2**30
    assert systems["airllm"]["status"] == "not installed" and str(nowhere) in systems["airllm"]["sentence"]
    assert systems["flexgen-policy"]["status"] == "cannot run it"
    assert document["measured_tokens"] == 3
    assert "Greedy tokens of accelerate" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--against", "vllm"), "The peer 'vllm' is not known"),
        (("--against", ","), "No peer is named"),
        (("--rounds", "0"), "must be at least 1"),
        (("--cut-gen-len", "1"), "must be at least 2"),
        (("--check-projection",), "give --cut-gen-len too"),
        (("--peer-python", "vllm=/usr/bin/python3"), "--peer-python names no peer in 'vllm'"),
        (("--peer-memory", "4GiB"), "--peer-memory names no peer in ''"),
        (("--peer-python", "a", "--peer-python", "b"), "--peer-python is given twice for all peers"),
        (("--format", "xml"), "The format 'xml' is not known"),
        (("--cores", "1-0"), "is no list of processors"),
        (("--host-memory", "much"), "is not a size"),
        (("--disk-rate", "500/s"), ""),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(options: tuple[str, ...], words: str, call: Call, home: Path, model: Path) -> None:
    if not words:
        options, words = ("--timeout", "soon", *options), "is not a duration"
    called = call("compare", model, *WORK, *options)
    assert called.code == 2 and words in called.sentence, called.err
    assert "Greedy tokens" not in called.err


def test_without_prompts_nothing_is_compared(call: Call, home: Path, model: Path) -> None:
    called = call("compare", model)
    assert called.code == 2 and "Nothing to complete" in called.sentence


def test_a_place_that_cannot_be_written_is_told_first(call: Call, home: Path, model: Path) -> None:
    Path("file").write_text("")
    called = call("compare", model, *WORK, "--out", "file/folder")
    assert called.code == 1 and "cannot be made" in called.sentence


def test_processors_of_a_list() -> None:
    assert cores_of("0") == (0,)
    with pytest.raises(UsageError, match="may not use the processor 65535"):
        cores_of("0,65535")


def test_plans_are_made_for_the_disk_as_it_is_limited() -> None:
    limited = with_disk_rate(machine(), 500_000_000)
    for was, now in zip(machine().disks[0].read, limited.disks[0].read, strict=True):
        assert now.bytes_per_s.y == tuple(min(rate, 5e8) for rate in was.bytes_per_s.y)
        assert now.bytes_per_s.fit is not None and now.bytes_per_s.fit.rate_per_s == 5e8
    assert with_disk_rate(machine(), 10**12) == machine()


def test_a_comparison_by_hand_is_sound() -> None:
    """What the reports' tests are made of can be written and read."""
    assert type(comparison()).model_validate_json(comparison().model_dump_json()) == comparison()
