"""A job goes on where a run before ended: killed, full disk, failed lines. What is finished is never touched; another job is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.full_disks import fill, fill_often, small_disk
from benchmarks.kills import Job, kill_often, whole_lines
from lmoffload.errors import StatedError
from lmoffload.jobs.manifest import manifest_place
from lmoffload.jobs.output import JobOutput
from tests.cli.conftest import Call, make_model

TEXTS = ("The sea is", "Tokens", "A language model reads a text token by token and", "x")


def job_file(*lines: dict[str, Any], name: str = "job.jsonl") -> Path:
    path = Path(name)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def prompts(count: int = 4) -> list[dict[str, Any]]:
    return [{"id": f"p{i}", "prompt": TEXTS[i % 4], "max_new_tokens": 2 + i} for i in range(count)]


def test_killed_again_and_again(profiled: Path, model: Path, tmp_path: Path) -> None:
    """Real processes, killed with -9. `make kills` does so twenty times."""
    seen = kill_often(Job.make(tmp_path, model, 40, 1), tmp_path, 2, 1)
    assert seen["kills_while_writing"] >= 1 and 0 < seen["most_computed_again_after_a_kill"] <= 4


def test_disks_that_fill_up(call: Call, profiled: Path, model: Path, tmp_path: Path) -> None:
    """Somebody else fills it while the job runs: a plain error, everything finished is there, and the next run goes on. `make full-disks`
    does so twenty times."""
    job, work = Job.make(tmp_path, model, 60, 2), tmp_path / "disks"
    work.mkdir()
    try:
        assert fill_often(job, work, 1, 2)["while_writing"] == 1
    except PermissionError:
        pytest.skip("file systems can be mounted by root alone")


def test_a_blocks_end_is_brought_to_the_disk(call: Call, profiled: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks within a second: the lines that are there whenever the output file is synced."""
    output, lines, sync = Path("out.jsonl"), [], os.fsync

    def counted(descriptor: int) -> None:
        sync(descriptor)
        if output.exists() and os.path.samestat(os.fstat(descriptor), output.stat()):
            lines.append(len(whole_lines(output)))

    monkeypatch.setattr(os, "fsync", counted)
    job = job_file(*({"prompt": text, "max_new_tokens": 3} for text in 3 * TEXTS))
    assert call("run", model, "--input", job, "--output", output, "--micro-batch", "2", "--num-micro-batches", "2").code == 0
    assert {4, 8, 12} <= set(lines)


def test_a_disk_that_is_full(call: Call, profiled: Path, model: Path, tmp_path: Path) -> None:
    """It is refused before anything is computed."""
    try:
        with small_disk(tmp_path / "disk", "64k") as disk:
            assert call("run", model, "--input", job_file(*prompts()), "--output", disk / "out.jsonl").code == 0
            fill(disk, 0)
            refused = call("run", model, "--input", job_file(*prompts()), "--output", disk / "other.jsonl", "--gen-len", "60")
            assert refused.code == 1 and "free where" in refused.sentence and not (disk / "other.jsonl").exists()
    except PermissionError:
        pytest.skip("file systems can be mounted by root alone")


def test_what_is_left_is_computed(call: Call, profiled: Path, model: Path) -> None:
    """A torn last line is cut off; the lines before stay, byte for byte; a finished job is told."""
    arguments = ("run", model, "--input", job_file(*prompts(6)), "--output", "out.jsonl")
    assert call(*arguments).code == 0
    output, whole = Path("out.jsonl"), Path("out.jsonl").read_bytes()
    done = call(*arguments)
    assert done.code == 0 and "All 6 lines of out.jsonl are finished already." in done.err and output.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    for torn in (b"".join(lines[:2]) + lines[2][:-1], lines[0] + lines[1][:7], lines[0][:1], b""):
        output.write_bytes(torn)
        kept = [line for line in torn.splitlines(keepends=True) if line.endswith(b"\n")]
        shown = call(*arguments, "--report", "report.json")
        assert shown.code == 0
        assert ("Going on with out.jsonl" in shown.err) == bool(torn)
        assert json.loads(Path("report.json").read_text(encoding="utf-8"))["prompts_computed"] == 6 - len(kept)
        assert output.read_bytes().startswith(b"".join(kept))
        assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_failed_lines_are_tried_again(call: Call, profiled: Path, model: Path) -> None:
    job = job_file({"id": "bad", "prompt": ""}, *prompts(3))
    arguments = ("run", model, "--input", job, "--output", "out.jsonl")
    assert call(*arguments).code == 1
    first = Path("out.jsonl").read_bytes().splitlines()
    assert json.loads(first[0])["id"] == "bad"
    again = call(*arguments)
    assert again.code == 1 and "Going on with out.jsonl: 3 of 4 lines are finished." in again.err
    second = Path("out.jsonl").read_bytes().splitlines()
    assert second[:3] == first[1:] and second[3] == first[0], "the finished ones as they were, the failed one anew"


def test_another_job_is_refused(call: Call, profiled: Path, model: Path, tmp_path: Path) -> None:
    job = job_file(*prompts())
    base = ["run", model, "--input", job, "--output", "out.jsonl", "--gen-len", "5"]
    assert call(*base).code == 0
    written = Path("out.jsonl").read_bytes()
    Path("out.jsonl").write_bytes(written.splitlines(keepends=True)[0])
    part, manifest = Path("out.jsonl").read_bytes(), manifest_place(Path("out.jsonl")).read_bytes()
    other_model = make_model(tmp_path / "other", seed=1)
    other_job = job_file(*prompts()[:3], {"id": "p3", "prompt": "changed"}, name="other.jsonl")
    for arguments, word in (
        (["run", other_model, *base[2:]], "another model (tiny-llama)"),
        ([*base[:3], other_job, *base[4:]], "another input (4 lines of job.jsonl"),
        ([*base[:-1], "6"], "gen_len 5 instead of 6"),
        ([*base, "--temperature", "0.5"], "temperature none instead of 0.5"),
        ([*base, "--stop", "x", "--stop", "y"], "stop none instead of 'x' and 'y'"),
        ([*base, "--logprobs"], "log_probabilities off instead of on"),
        ([*base, "--seed", "3"], "seed none instead of 3"),
    ):
        shown = call(*arguments)
        assert (shown.code, shown.out) == (1, ""), arguments
        assert word in shown.sentence and "--restart" in shown.sentence
        assert (Path("out.jsonl").read_bytes(), manifest_place(Path("out.jsonl")).read_bytes()) == (part, manifest)
    place = manifest_place(Path("out.jsonl"))
    begun = json.loads(manifest)
    begun["plan"]["kernels"]["decode"] = "fused_dot" if begun["plan"]["kernels"]["decode"] != "fused_dot" else "widen_tiles"
    place.write_text(json.dumps(begun), encoding="utf-8")
    shown = call(*base, "--threads", "1")
    assert shown.code == 1 and "other formats or kernels" in shown.sentence and Path("out.jsonl").read_bytes() == part
    place.write_bytes(b"{}")
    assert "job manifest out.jsonl.job is not valid" in call(*base).sentence and Path("out.jsonl").read_bytes() == part
    assert call(*base[:-1], "6", "--restart").code == 0, "asked for, it begins anew"
    assert len(whole_lines(Path("out.jsonl"))) == 4


def test_without_a_seed_the_jobs_own_holds(call: Call, profiled: Path, model: Path) -> None:
    """What is sampled after going on is what one run would have sampled."""
    arguments = ["run", model, "--input", job_file(*prompts(6)), "--output", "out.jsonl", "--temperature", "2.0"]
    assert call(*arguments).code == 0
    whole = Path("out.jsonl").read_bytes().splitlines()
    Path("out.jsonl").write_bytes(whole[0] + b"\n")
    assert call(*arguments).code == 0
    assert sorted(Path("out.jsonl").read_bytes().splitlines()) == sorted(whole)
    assert call(*arguments, "--restart").code == 0
    assert sorted(Path("out.jsonl").read_bytes().splitlines()) != sorted(whole), "another seed"


def test_two_runs_on_one_output(call: Call, profiled: Path, model: Path) -> None:
    arguments = ["run", model, "--input", job_file(*prompts()), "--output", "out.jsonl"]
    with JobOutput(Path("out.jsonl")):
        refused = call(*arguments)
        assert refused.code == 1 and "Another run is writing to the output file out.jsonl" in refused.sentence
        with pytest.raises(StatedError, match="Another run"), JobOutput(Path("out.jsonl"), restart=True):
            pass
    assert not Path("out.jsonl").exists(), "nothing was written to it"
    assert call(*arguments).code == 0 and call(*arguments).code == 0
