"""The comparisons of docs/results.md: runs `lmoffload compare` for each, and holds the ratios against what is aimed at.

python -m benchmarks.compare_figures [CASE ...] --models DIR --out DIR [--peer-python [PEER=]FILE ...] [--rounds 3] [--layers N] [--dry-run]
Without CASE all of them; --dry-run prints the commands. Models are dummies, written to --models where they are not there yet; with --layers
they are slices of so many layers, to try the commands out. Wants a quiet machine, root, and Python environments that have the peers.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmoffload.checkpoint.dummy import make_dummy
from lmoffload_solver.comparison import Comparison, Row
from lmoffload_solver.value import read_value


@dataclass(frozen=True)
class Target:
    """Ours ÷ theirs, at least."""

    system: str
    kind: str
    """"default", or "best"."""
    least: float
    field: str = "tokens_per_s"


@dataclass(frozen=True)
class Case:
    """One comparison."""

    shape: str
    arguments: str
    targets: tuple[Target, ...] = ()
    layers: int | None = None
    largest_projection_error: float | None = None


CASES: Mapping[str, Case] = {
    "exact": Case(
        "llama-1.1b",
        "--num-prompts 64 --prompt-len 64 --gen-len 16 --host-memory 1GiB --disk-rate 500MB --peer-memory zero-inference=8GiB "
        "--against accelerate,zero-inference,llama.cpp,airllm,accelerate-policy,zero-policy",
        (
            Target("accelerate", "default", 5.0),
            Target("accelerate", "best", 2.0),
            Target("zero-inference", "best", 3.0),
            Target("llama.cpp", "best", 1.25),
        ),
    ),
    "int4": Case(
        "llama-3.2-3b",
        "--num-prompts 32 --prompt-len 64 --gen-len 16 --host-memory 1.5GiB --disk-rate 500MB --quality int4 --against llama.cpp",
        (Target("llama.cpp", "best", 2.0),),
    ),
    "int4-one-stream": Case(
        "llama-3.2-3b",
        "--num-prompts 1 --prompt-len 64 --gen-len 16 --host-memory 1.5GiB --disk-rate 500MB --quality int4 --against llama.cpp",
        (Target("llama.cpp", "best", 0.9),),
    ),
    "resident": Case(
        "llama-1.1b",
        "--num-prompts 32 --prompt-len 32 --gen-len 8 --quality int4 --warm --against llama.cpp",
        (Target("llama.cpp", "best", 1.7, "prefill_tokens_per_s"), Target("llama.cpp", "best", 1.6, "decode_tokens_per_s")),
    ),
    "resident-one-stream": Case(
        "llama-1.1b",
        "--num-prompts 1 --prompt-len 64 --gen-len 24 --quality int4 --warm --against llama.cpp",
        (Target("llama.cpp", "best", 0.9, "decode_tokens_per_s"),),
    ),
    "emulated": Case(
        "llama-1.1b",
        "--num-prompts 384 --prompt-len 32 --gen-len 16 --emulate-device 320MiB@250MB/s "
        "--against flexgen-policy,zero-policy,accelerate-policy",
        layers=11,
    ),
    "projection": Case(
        "llama-1.1b",
        "--num-prompts 16 --prompt-len 64 --gen-len 64 --host-memory 1GiB --disk-rate 500MB --cut-gen-len 8 --check-projection --no-sweep "
        "--against accelerate",
        largest_projection_error=0.05,
    ),
}


def command_of(case: Case, model: Path, out: Path, pythons: list[str], rounds: int, machine: str | None) -> list[str]:
    """The command line that makes a case's documents."""
    more = [word for python in pythons for word in ("--peer-python", python)] + (["--machine", machine] if machine else [])
    arguments = [*case.arguments.split(), "--rounds", str(rounds), *more, "--out", str(out)]
    return [sys.executable, "-m", "lmoffload", "compare", str(model), *arguments]


def model_of(case: Case, folder: Path, layers: int | None) -> Path:
    """The case's model, written now where it is not there."""
    number = layers or case.layers
    place = folder / (case.shape if number is None else f"{case.shape}-{number}-layers")
    if not (place / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_dummy(case.shape, place, number)
    return place


def verdicts(case: Case, found: Comparison) -> Iterator[dict[str, object]]:
    """Each target with the ratio that was measured; None where a side has no figures."""
    rows = {system.name: system.rows for system in found.systems}
    for target in case.targets:
        mine = _row(rows["lmoffload"], "best")
        theirs = _row(rows.get(target.system, ()), target.kind)
        values = [None if row is None else row.median(target.field) for row in (mine, theirs)]
        ratio = values[0] / values[1] if values[0] and values[1] else None
        named = f"{target.system}, {target.kind}, {target.field}"
        yield {"against": named, "aim": target.least, "ratio": ratio, "reached": ratio is not None and ratio >= target.least}
    if case.largest_projection_error is not None:
        for name, told in rows.items():
            errors = [abs(run.projection_error) for row in told for run in row.counted if run.projection_error is not None]
            worst = max(errors, default=None)
            reached = worst is not None and worst <= case.largest_projection_error
            yield {"against": f"projection, {name}", "aim": case.largest_projection_error, "ratio": worst, "reached": reached}


def _row(rows: tuple[Row, ...], kind: str) -> Row | None:
    """The row of a kind; of the best where the default is the best."""
    return next((row for row in rows if row.kind == kind), rows[0] if rows else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer-python", action="append", default=[])
    parser.add_argument("--machine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    results: dict[str, object] = {}
    for name in options.cases or CASES:
        case = CASES[name]
        model = options.models / "MODEL" if options.dry_run else model_of(case, options.models, options.layers)
        command = command_of(case, model, options.out / name, options.peer_python, options.rounds, options.machine)
        print(f"{name}: {shlex.join(command)}", flush=True)
        if not options.dry_run:
            subprocess.run(command, check=True)
            told = list(verdicts(case, read_value(Comparison, options.out / name / "comparison.json", "comparison")))
            for verdict in told:
                print(f"{name}: {verdict}", flush=True)
            results[name] = told
    print(json.dumps(results))


if __name__ == "__main__":
    main()
