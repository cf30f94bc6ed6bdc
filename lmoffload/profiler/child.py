"""What is measured in a process of its own: `python -m lmoffload.profiler.child WHAT ARGUMENTS`; see `apart`.

ARGUMENTS is a JSON object. One JSON object a line goes to standard output: {"told": ...} while it goes on, then {"answer": ...}, or
{"stated": SENTENCE} where a stated error ends it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmoffload.environment import prepare_allocator, prepare_signals, prepare_threads
from lmoffload_solver.errors import StatedError

DEFAULT_ROWS = 4
DEFAULT_MATRICES = 4
BASE_FORMATS = ("bf16", "q4_0")
"""A run compiles the kernels of its own formats: those of one, and of one block format."""
N, K = 5632, 2048

Say = Callable[[dict[str, Any]], None]


def base(say: Say) -> dict[str, Any]:
    """Peak resident bytes after all that a run loads and compiles, for a model that is next to nothing."""
    prepare_threads()
    prepare_allocator()

    import highspy  # noqa: F401  a run is planned first, by the same process
    import torch

    import lmoffload_solver.search  # noqa: F401

    torch.set_num_threads(1)
    from lmoffload.checkpoint import open_checkpoint
    from lmoffload.executor.process import peak_resident_bytes
    from lmoffload.kernels.linear import kernels_for, linear
    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.pool import Pool
    from lmoffload.profiler.tiny import decode_times, write_tiny_checkpoint
    from lmoffload.profiler.weights import random_blocks
    from lmoffload_solver.formats import stored_bytes

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_tiny_checkpoint(Path(folder)))
        decode_times(checkpoint, rows=4, steps=8, threads=2, kernel=kernels_for("fp32")[0])
    with Pool(1) as pool:
        for format_name in BASE_FORMATS:
            matrix = Matrix(random_blocks(format_name)[: stored_bytes((64, 64), format_name)].clone(), format_name, 64, 64)
            for kernel in kernels_for(format_name):
                linear(torch.ones(4, 64), matrix, kernel, pool)
    return {"bytes": peak_resident_bytes()}


def default_threads(say: Say) -> dict[str, Any]:
    """Seconds of a decode-sized product as torch runs it when it is left alone."""
    import itertools
    from functools import partial

    import torch
    from torch.nn.functional import linear

    from lmoffload.profiler.samples import repeat

    weights = itertools.cycle([torch.randn(N, K) for _ in range(DEFAULT_MATRICES)])
    x = torch.randn(DEFAULT_ROWS, K)
    with torch.no_grad():
        sample = repeat(lambda: partial(linear, x)(next(weights)), 1.0, at_least=5)
    return {"seconds": sample.median_s, "threads": torch.get_num_threads()}


def profile(say: Say, disk_path: str, **choices: Any) -> dict[str, Any]:
    """A whole profile."""
    for remark in prepare_threads():
        say({"remark": remark})
    prepare_allocator()
    from lmoffload.profiler.profile_machine import profile as measure

    measured = measure(disk_path=Path(disk_path), on_progress=lambda progress: say(asdict(progress)), **choices)
    return {"profile": measured.model_dump_json()}


def disk(say: Say, path: str) -> dict[str, Any]:
    """One disk, quickly."""
    from lmoffload.profiler.disk import measure_disk

    return {"disk": measure_disk(Path(path), quick=True).model_dump_json()}


MEASUREMENTS: Mapping[str, Callable[..., dict[str, Any]]] = MappingProxyType(
    {"base": base, "default_threads": default_threads, "profile": profile, "disk": disk}
)


def main(measurements: Mapping[str, Callable[..., dict[str, Any]]], what: str, arguments: dict[str, Any]) -> int:
    """Measure, and write what is said to standard output, which nothing else then reaches."""
    prepare_signals()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=lines, flush=True)

    try:
        write({"answer": measurements[what](lambda told: write({"told": told}), **arguments)})
    except StatedError as error:
        write({"stated": str(error)})
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # whoever asked has gone, and takes our files away
    return 0


if __name__ == "__main__":
    sys.exit(main(MEASUREMENTS, sys.argv[1], json.loads(sys.argv[2])))
