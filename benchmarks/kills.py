"""Kill a job at random moments (-9) and run the same command again, until it is done; hold its output against an undisturbed run's.

    python -m benchmarks.kills --kills 20 --prompts 200

What must hold: the lines finished before a kill stay as they were, byte for byte; every line is there once; in all the output is that of
the undisturbed run, order aside; and no run computes a finished prompt again, so that at most a block is computed again after a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NICE = 5


@dataclass(frozen=True)
class Job:
    """A command whose output file comes last."""

    command: tuple[str, ...]
    num_prompts: int

    @staticmethod
    def make(folder: Path, model: Path, num_prompts: int, seed: int) -> Job:
        """Prompts of any length, sampled with a seed of their own or the job's, in `folder`."""
        chance, file = random.Random(seed), folder / "prompts.jsonl"
        words = ("sea", "a", "token", "reads", "model", "and", "the", "language")
        with file.open("w", encoding="utf-8") as lines:
            for number in range(num_prompts):
                prompt = " ".join(chance.choice(words) for _ in range(chance.randint(1, 12)))
                line: dict[str, object] = {"id": f"p{number}", "prompt": prompt, "max_new_tokens": chance.randint(1, 60)}
                lines.write(json.dumps(line | ({"temperature": 0.9} if number % 3 else {"seed": number})) + "\n")
        options = ("--seed", "7", "--nice", str(NICE), "--micro-batch", "2", "--num-micro-batches", "2", "--weights-memory", "50%")
        return Job((sys.executable, "-m", "lmoffload", "run", str(model), "--input", str(file), *options, "--output"), num_prompts)

    def start(self, output: Path, *more: str) -> subprocess.Popen[str]:
        """A run, under way."""
        return subprocess.Popen([*self.command, str(output), *more], stderr=subprocess.PIPE, text=True, env=os.environ)

    def finish(self, output: Path, *more: str) -> str:
        """A run to its end; returns its remarks."""
        with self.start(output, *more) as process:
            _, remarks = process.communicate(timeout=300)
        assert process.returncode == 0, remarks
        return remarks


def whole_lines(output: Path) -> list[bytes]:
    """The lines that have been written to their end."""
    return [line for line in output.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if output.exists() else []


def kill_at_random(job: Job, output: Path, chance: random.Random, most_lines: int) -> tuple[list[bytes], int]:
    """One run killed: at any moment of its start, or when some more lines are there. Returns the lines before it and those it added."""
    before = whole_lines(output)
    with job.start(output) as process:
        if chance.random() < 0.25:
            time.sleep(chance.uniform(0, 4))
        else:
            more = chance.randint(1, max(1, most_lines))
            while process.poll() is None and len(whole_lines(output)) < len(before) + more:
                time.sleep(0.005)
            assert process.poll() is not None or os.getpriority(os.PRIO_PROCESS, process.pid) == NICE, "as nice as asked"
            time.sleep(chance.uniform(0, 0.05))
        process.kill()
    after = whole_lines(output)
    assert after[: len(before)] == before, "lines finished before a kill are as they were"
    return before, len(after) - len(before)


def kill_often(job: Job, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """What the module's docstring says; returns what was seen.

    Raises:
        AssertionError: something does not hold.
    """
    undisturbed, output, chance = folder / "undisturbed.jsonl", folder / "out.jsonl", random.Random(seed)
    job.finish(undisturbed)
    expected, added = whole_lines(undisturbed), []
    assert len(expected) == job.num_prompts
    for _ in range(kills):
        added.append(kill_at_random(job, output, chance, 2 * job.num_prompts // (kills + 1))[1])
    before, report = whole_lines(output), folder / "report.json"
    remarks = job.finish(output, "--report", str(report)) if len(before) < job.num_prompts else job.finish(output)
    after = whole_lines(output)
    assert after[: len(before)] == before and b"".join(after) == output.read_bytes()
    assert sorted(after) == sorted(expected), "the output is that of the undisturbed run"
    computed = json.loads(report.read_text(encoding="utf-8"))["prompts_computed"] if report.exists() else 0
    assert computed == job.num_prompts - len(before), remarks
    while_writing = sum(map(bool, added))
    return {"kills": kills, "kills_while_writing": while_writing, "lines_before_the_last_run": len(before), "computed_by_it": computed}


def prepared(folder: Path, num_prompts: int, seed: int) -> Job:
    """A job on a tiny model in `folder`; a profile lies in the user's data directory."""
    from lmoffload.checkpoint.dummy_tokenizer import write_tokenizer
    from lmoffload.profiler.limits import disk_of
    from lmoffload.profiler.store import default_profile_path, save_profile
    from tests.cli.machines import machine
    from tests.models import tiny_checkpoint

    save_profile(machine(file_system=disk_of(folder).mount_point), default_profile_path())
    model = tiny_checkpoint("llama", folder / "model", vocab_size=300)
    write_tokenizer(model, 300)
    return Job.make(folder, model, num_prompts, seed)


def command(description: str, often: Callable[[Job, Path, int, int], dict[str, int]], *, option: str) -> None:
    """A command that does something to a job many times, and prints what came of it; `option` says how many."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(option, type=int, default=20, dest="times")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {variable: f"{name}/{variable}" for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME")}
        folder = Path(name)
        print(json.dumps(often(prepared(folder, chosen.prompts, chosen.seed), folder, chosen.times, chosen.seed)))


if __name__ == "__main__":
    command("Kill a job at random moments and go on with it.", kill_often, option="--kills")
