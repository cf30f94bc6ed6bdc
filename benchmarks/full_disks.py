"""Fill the disk of a job's output at random moments, and go on when there is room again; hold the output against an undisturbed run's.

    python -m benchmarks.full_disks --times 20 --prompts 400

The disk is a small tmpfs, so that this needs root. What must hold: the run ends with one sentence, which names the file and the reason;
the lines finished before stay as they were, byte for byte, and every line that is there is whole but for the last; with room again, the
same command goes on, with at most a block computed again, and in the end the output is that of the undisturbed run, order aside.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.kills import MOST_S, Job, command, whole_lines

PAGE_BYTES = 4096
"""What a tmpfs counts in."""
STATED = ("cannot be written: No space left on device", "free where", "No space left on device")
"""How a run says so: of the output, before it begins, and of the manifest."""


@contextmanager
def small_disk(place: Path, size: str = "2m") -> Iterator[Path]:
    """A disk of that size.

    Raises:
        PermissionError: only root may mount one.
    """
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        raise PermissionError(f"no file system can be mounted: {mounted.stderr.decode()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, free_pages: int) -> Path:
    """A file that leaves so much."""
    filler = disk / "filler"
    filler.write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - free_pages * PAGE_BYTES))
    return filler


def fill_at_random(job: Job, output: Path, chance: random.Random, most_lines: int) -> tuple[bool, int, int]:
    """One run during which the disk is filled: at any moment of its start, or after some more lines. Returns whether that ended it, how
    many lines it added, and how many prompts are to be computed again."""
    before, more = whole_lines(output), chance.randint(1, most_lines)
    at_start, wait_s, pages = chance.random() < 0.2, chance.uniform(0, 4), chance.randint(0, 1)
    with job.start(output) as process:
        if at_start:
            time.sleep(wait_s)
        else:
            while process.poll() is None and len(whole_lines(output)) < len(before) + more:
                time.sleep(0.005)
        filler = fill(output.parent, pages)
        _, remarks = process.communicate(timeout=MOST_S)
    filler.unlink()
    after, last = whole_lines(output), remarks.strip().splitlines()[-1]
    assert "Traceback" not in remarks, remarks
    if process.returncode:
        assert process.returncode == 1 and last.startswith("lmoffload: ") and any(word in last for word in STATED), remarks
    else:
        assert len(after) == job.num_prompts, "what was left found room"
    assert after[: len(before)] == before, "lines finished before are as they were"
    assert all(json.loads(line)["finish_reason"] != "error" for line in after)
    return process.returncode != 0, len(after) - len(before), job.computed_again(output, before, after)


def fill_often(job: Job, folder: Path, times: int, seed: int) -> dict[str, int]:
    """What the module's docstring says; returns what was seen.

    Raises:
        AssertionError: something does not hold.
        PermissionError: only root can do so.
    """
    chance, undisturbed = random.Random(seed), folder / "undisturbed.jsonl"
    job.finish(undisturbed)
    with small_disk(folder / "disk") as disk:
        output = disk / "out.jsonl"
        most_lines = max(1, job.num_prompts // (2 * times))  # a few more find room in a page that is there
        ended, added, again = zip(*(fill_at_random(job, output, chance, most_lines) for _ in range(times)), strict=True)
        before = whole_lines(output)
        job.finish(output)
        after = whole_lines(output)
        assert after[: len(before)] == before and b"".join(after) == output.read_bytes()
        assert {path.name for path in disk.iterdir()} == {"out.jsonl", "out.jsonl.job"}, "nothing is left behind"
    assert sorted(after) == sorted(whole_lines(undisturbed)) and len(after) == job.num_prompts, "the output is that of the undisturbed run"
    return {
        "times": times,
        "runs_ended_by_it": sum(ended),
        "while_writing": sum(map(bool, added)),
        "computed_again": sum(again),
        "most_computed_again_at_a_time": max(again),
        "lines_before_the_last_run": len(before),
    }


if __name__ == "__main__":
    command("Fill a job's disk at random moments and go on with it.", fill_often, option="--times")
