"""Everything about plans with a device that only a device can show, in eight minutes. Not yet run on a GPU.

python -m benchmarks.gpu_check [--memory 16GiB] [--budget 480] [--folder DIR]     on this machine's GPU
python -m benchmarks.gpu_check --device cpu                                       a rehearsal of the script: tiny sizes, torch's CPU
Each part runs in a process of its own with a time limit: one that fails, hangs or breaks the device's context is reported, and the others
go on. Prints a table; the last line of stdout is one JSON document. Ends with 0 where every part passed, else 1. Needs about 20 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_exactness import exactness, races
from benchmarks.gpu_kernels import kernels, profiled
from benchmarks.gpu_prediction import llama_70b, opt_30b, prediction
from benchmarks.gpu_runs import Check
from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload.units import parse_size

CLOSE_S = 3.0
"""Kept of the budget for printing."""

PARTS: Mapping[str, tuple[Callable[[Check], dict[str, Any]], float]] = {
    "profile": (profiled, 110.0),
    "kernels": (kernels, 50.0),
    "exactness": (exactness, 80.0),
    "races": (races, 80.0),
    "prediction": (prediction, 80.0),
    "opt-30b": (opt_30b, 100.0),
    "llama-3-70b": (llama_70b, 110.0),
}
"""Each with the seconds that it may take at most; what is left of the budget bounds it as well."""


def run_part(check: Check, name: str) -> dict[str, Any]:
    """In this process; what failed is told, not raised."""
    begin = time.perf_counter()
    try:
        found, outcome = PARTS[name][0](check), "passed"
    except Exception as error:
        found, outcome = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}, "failed"
    return {"part": name, "outcome": outcome, "seconds": time.perf_counter() - begin, **found}


def start_part(check: Check, name: str, limit_s: float) -> dict[str, Any]:
    """In a process of its own, which is ended when its time is over."""
    options = ["--device", check.device, "--memory", str(check.memory_bytes), "--folder", str(check.folder), "--part", name]
    command, begin = [sys.executable, "-m", "benchmarks.gpu_check", *options], time.perf_counter()
    told = {"part": name, "outcome": "failed"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {**told, "seconds": time.perf_counter() - begin, "error": f"not done after {limit_s:.0f} s"}
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return {**told, "seconds": time.perf_counter() - begin, "error": f"ended with {done.returncode}: {done.stderr[-800:]}"}


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """A line for each part."""
    table = Table("part", "outcome", "s", "found")
    left_out = {"part", "outcome", "seconds", "trace", "rates"}
    for row in rows:
        found = "; ".join(f"{name} {_short(value)}" for name, value in row.items() if name not in left_out)
        table.add_row(row["part"], row["outcome"], f"{row['seconds']:.1f}", found)
    console.print(table)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(map(_short, value)) + "]" if isinstance(value, list) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--memory", default="16GiB", help="of the device, at most")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all")
    parser.add_argument("--folder", type=Path, help="for checkpoints and the profile; by default a temporary one, which is removed")
    parser.add_argument("--only", help="parts, separated by commas; profile is always run")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    prepare_threads()
    prepare_allocator()
    if options.part is not None:
        print(json.dumps(run_part(Check(options.device, int(options.memory), options.folder), options.part)))
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here that torch can use: run this where there is one, or rehearse it with --device cpu.", file=sys.stderr)
        return 1
    begin, names = time.perf_counter(), list(PARTS) if options.only is None else ["profile", *options.only.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = temporary if options.folder is None else options.folder
        Path(folder).mkdir(parents=True, exist_ok=True)
        check, rows = Check(options.device, parse_size(options.memory), Path(folder).absolute()), []
        for name in names:
            left_s = options.budget - CLOSE_S - (time.perf_counter() - begin)
            print(f"{name}: at most {max(0.0, min(PARTS[name][1], left_s)):.0f} s", file=sys.stderr)
            if left_s < 1:
                rows.append({"part": name, "outcome": "not begun", "seconds": 0.0})
            else:
                rows.append(start_part(check, name, min(PARTS[name][1], left_s)))
    show(Console(width=220), rows)
    document = {"device": options.device, "torch": torch.__version__, "seconds": time.perf_counter() - begin, "parts": rows}
    print(json.dumps(document))
    return 0 if all(row["outcome"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
