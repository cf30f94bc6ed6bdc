"""Ten different jobs, each within a kernel limit on memory of its plan's peak and 5 % more: is any of them killed?

    python -m benchmarks.ten_jobs [--only NAME ...] [--margin 0.05] [--warm]

Needs root and control groups, as benchmarks/limited does, which drops the page cache first unless --warm. This machine's profile must be
there, or is made first, quickly. Models are dummies and SmolLM2-135M; 2 GB of disk are used meanwhile. The last line of standard output is
one JSON document; the exit code is 1 where a job was killed or left a prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LIMITED = Path(__file__).resolve().parent / "limited"
SMOLLM2, TINY_LLAMA, WIDE_VOCABULARY = "SmolLM2-135M", "llama-1.1b", "qwen2.5-0.5b"


@dataclass(frozen=True)
class Case:
    """A job: prompts of lengths within a range (in words), or synthetic ones, and how it is to be run."""

    name: str
    model: str
    options: tuple[str, ...]
    words: tuple[int, int] | None = None
    num_prompts: int = 0
    run_options: tuple[str, ...] = ()
    kind: str = ".jsonl"


def synthetic(count: int, length: int, new: int, *more: str) -> tuple[str, ...]:
    """The options of synthetic prompts."""
    return ("--num-prompts", str(count), "--prompt-len", str(length), "--gen-len", str(new), *more)


EIGHT_BY_TWO = ("--micro-batch", "8", "--num-micro-batches", "2")
SAMPLED = ("--temperature", "0.8", "--seed", "1")

CASES = (
    Case("most weights on disk", TINY_LLAMA, synthetic(16, 64, 8, "--weights-memory", "30%")),
    Case("all in memory", TINY_LLAMA, synthetic(8, 128, 8)),
    Case("8-bit weights", TINY_LLAMA, synthetic(16, 64, 8, "--quality", "int8")),
    Case("4-bit weights, half on disk", TINY_LLAMA, synthetic(16, 64, 8, "--quality", "int4", "--weights-memory", "15%")),
    Case("one prompt, step by step", SMOLLM2, synthetic(1, 32, 48, "--weights-memory", "50%")),
    Case("lengths of every kind", SMOLLM2, ("--gen-len", "24"), words=(1, 300), num_prompts=60),
    Case("keys and values beyond memory", SMOLLM2, synthetic(16, 256, 8, *EIGHT_BY_TWO, "--host-memory", "680MiB")),
    Case("long prompts", SMOLLM2, synthetic(2, 1900, 8)),
    Case("a vocabulary of 151,936", WIDE_VOCABULARY, synthetic(32, 40, 4, "--weights-memory", "60%"), run_options=SAMPLED),
    Case("Parquet in and out", SMOLLM2, ("--gen-len", "12"), words=(1, 40), num_prompts=200, run_options=("--logprobs",), kind=".parquet"),
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What came of a job."""

    job: str
    planned_bytes: int
    limit_bytes: int
    peak_rss_bytes: int | None
    cgroup_peak_bytes: int | None
    exit_code: int
    finished: int

    @property
    def is_whole(self) -> bool:
        return self.exit_code == 0


def model_of(name: str, folder: Path) -> Path:
    """The model's place, made where it is a dummy: four layers of its shape."""
    from lmoffload.api.demo import find_demo_model
    from lmoffload.checkpoint import make_dummy

    if name == SMOLLM2:
        return find_demo_model()
    place = folder / name
    return place if place.exists() else make_dummy(name, place, layers=4)


def prompts_of(case: Case, folder: Path) -> tuple[str, ...]:
    """The option that names the case's prompts, written to a file; none where they are synthetic."""
    if case.words is None:
        return ()
    chance, file = random.Random(0), folder / f"prompts{case.kind}"
    words = ("sea", "stone", "token", "reads", "river", "and", "the", "language")
    rows = [{"id": f"p{i}", "prompt": " ".join(chance.choices(words, k=chance.randint(*case.words)))} for i in range(case.num_prompts)]
    if case.kind == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ("--input", str(file))


def seen_of(case: Case, model: Path, folder: Path, margin: float, warm: bool) -> Seen:
    """Plan a job without a limit, and run it within its peak and the margin.

    Raises:
        CalledProcessError: there is no plan.
    """
    lmoffload = (sys.executable, "-m", "lmoffload")
    plan_file, output, report = folder / "plan.json", folder / f"out{case.kind}", folder / "report.json"
    prompts = prompts_of(case, folder)
    subprocess.run([*lmoffload, "plan", str(model), *case.options, *prompts, "--out", str(plan_file)], check=True, capture_output=True)
    planned = json.loads(plan_file.read_text(encoding="utf-8"))["predicted"]["peak_bytes"]["host"]
    limit = int(planned * (1 + margin))
    work = [*_work(case.options), *prompts]
    run = [
        *lmoffload,
        "run",
        str(model),
        "--plan",
        str(plan_file),
        *work,
        *case.run_options,
        "--output",
        str(output),
        "--report",
        str(report),
    ]
    done = subprocess.run(
        [sys.executable, str(LIMITED), "--memory", str(limit), *(("--no-drop",) if warm else ()), "--", *run],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    peak = re.search(r"peak_memory_bytes=(\d+)", done.stderr)
    rss = json.loads(report.read_text(encoding="utf-8"))["peak_rss_bytes"] if report.exists() else None
    lines = Path(f"{output}.jsonl") if case.kind != ".jsonl" else output
    finished = len(lines.read_bytes().splitlines()) if lines.exists() else 0
    return Seen(case.name, planned, limit, rss, None if peak is None else int(peak[1]), done.returncode, finished)


def _work(options: Sequence[str]) -> Iterator[str]:
    """What a plan does not fix of the options that it was made with."""
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option in ("--num-prompts", "--prompt-len", "--gen-len"):
            yield from (option, value)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Ten jobs within their planned memory.")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], default=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--warm", action="store_true")
    chosen = parser.parse_args()
    rows: list[Seen] = []
    with tempfile.TemporaryDirectory() as models:
        for case in CASES:
            if case.name not in chosen.only:
                continue
            with tempfile.TemporaryDirectory(dir=models) as folder:
                row = seen_of(case, model_of(case.model, Path(models)), Path(folder), chosen.margin, chosen.warm)
            rows.append(row)
            rss = "?" if row.peak_rss_bytes is None else f"{row.peak_rss_bytes / row.planned_bytes - 1:+.1%}"
            print(f"{row.job}: planned {row.planned_bytes / 2**20:.0f} MiB, seen {rss}, exit {row.exit_code}", file=sys.stderr, flush=True)
    failed = [row.job for row in rows if not row.is_whole]
    print(json.dumps({"jobs": len(rows), "failed": failed, "seen": [asdict(row) for row in rows]}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
