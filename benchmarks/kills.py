"""Kill a job at random moments (-9) and run the same command again, until it is done; hold its output against an undisturbed run's.

    python -m benchmarks.kills --kills 20 --prompts 200

What must hold: the lines finished before a kill stay as they were, byte for byte; every line is there once; in all the output is that of
the undisturbed run, order aside; no run begins a prompt that was finished before; and those that a killed run had begun and not finished,
which are computed again, are never more than a block has places. What is begun is noted by the runs themselves, see `benchmarks.noted`.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmoffload.jobs.manifest import manifest_place

NICE, MOST_NICE = 5, 19
MOST_S = 1200
"""Of one run, on a machine that is busy with other things."""
NOTED = Path(__file__).resolve().parent / "noted.py"


@dataclass(frozen=True)
class Job:
    """A command whose output file comes last."""

    command: tuple[str, ...]
    num_prompts: int
    begun_file: Path
    """Takes the ids of the prompts that the run under way begins."""

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
        begun = folder / "begun"
        program = (sys.executable, str(NOTED), str(begun))
        return Job((*program, "run", str(model), "--input", str(file), *options, "--output"), num_prompts, begun)

    def start(self, output: Path, *more: str) -> subprocess.Popen[str]:
        """A run, under way."""
        self.begun_file.unlink(missing_ok=True)
        return subprocess.Popen([*self.command, str(output), *more], stderr=subprocess.PIPE, text=True, env=os.environ)

    def finish(self, output: Path, *more: str) -> str:
        """A run to its end; returns its remarks."""
        with self.start(output, *more) as process:
            _, remarks = process.communicate(timeout=MOST_S)
        assert process.returncode == 0, remarks
        return remarks

    def computed_again(self, output: Path, before: Sequence[bytes], after: Sequence[bytes]) -> int:
        """How many prompts the last run, which found the lines `before` and left those `after`, had begun and not finished.

        Raises:
            AssertionError: it began one that was finished before, or more than a block has places.
        """
        begun = self.begun_file.read_text(encoding="utf-8").split() if self.begun_file.exists() else []
        assert not set(begun) & ids_of(before), "what is finished is never begun again"
        lost = set(begun) - ids_of(after)
        if lost:
            plan = json.loads(manifest_place(output).read_text(encoding="utf-8"))["plan"]
            assert len(lost) <= plan["micro_batch"] * plan["num_micro_batches"], "at most a block is computed again"
        return len(lost)


def ids_of(lines: Iterable[bytes]) -> set[str]:
    """Of results."""
    return {json.loads(line)["id"] for line in lines}


def whole_lines(output: Path) -> list[bytes]:
    """The lines that have been written to their end."""
    return [line for line in output.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if output.exists() else []


def kill_at_random(job: Job, output: Path, chance: random.Random, most_lines: int) -> tuple[int, int]:
    """One run killed: at any moment of its start, or when some more lines are there. Returns how many lines it added, and how many prompts
    are to be computed again."""
    before = whole_lines(output)
    with job.start(output) as process:
        if chance.random() < 0.25:
            time.sleep(chance.uniform(0, 4))
        else:
            more = chance.randint(1, max(1, most_lines))
            while process.poll() is None and len(whole_lines(output)) < len(before) + more:
                time.sleep(0.005)
            nice = min(MOST_NICE, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
            assert process.poll() is not None or os.getpriority(os.PRIO_PROCESS, process.pid) == nice, "as nice as asked"
            time.sleep(chance.uniform(0, 0.5))
        process.kill()
    after = whole_lines(output)
    assert after[: len(before)] == before, "lines finished before a kill are as they were"
    return len(after) - len(before), job.computed_again(output, before, after)


def kill_often(job: Job, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """What the module's docstring says; returns what was seen.

    Raises:
        AssertionError: something does not hold.
    """
    undisturbed, output, chance = folder / "undisturbed.jsonl", folder / "out.jsonl", random.Random(seed)
    job.finish(undisturbed)
    expected = whole_lines(undisturbed)
    assert len(expected) == job.num_prompts
    added, again = zip(*(kill_at_random(job, output, chance, 2 * job.num_prompts // (kills + 1)) for _ in range(kills)), strict=True)
    before, report = whole_lines(output), folder / "report.json"
    remarks = job.finish(output, "--report", str(report)) if len(before) < job.num_prompts else job.finish(output)
    after = whole_lines(output)
    assert after[: len(before)] == before and b"".join(after) == output.read_bytes()
    assert sorted(after) == sorted(expected), "the output is that of the undisturbed run"
    assert job.computed_again(output, before, after) == 0
    computed = json.loads(report.read_text(encoding="utf-8"))["prompts_computed"] if report.exists() else 0
    assert computed == job.num_prompts - len(before), remarks
    return {
        "kills": kills,
        "kills_while_writing": sum(map(bool, added)),
        "computed_again": sum(again),
        "most_computed_again_after_a_kill": max(again),
        "lines_before_the_last_run": len(before),
        "computed_by_it": computed,
    }


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
