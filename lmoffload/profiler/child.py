"""What is measured in a process of its own: `python -m lmoffload.profiler.child base|default_threads FOLDER` prints one JSON document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lmoffload_solver.errors import StatedError

DEFAULT_ROWS = 4
DEFAULT_MATRICES = 4
BASE_FORMATS = ("bf16", "q4_0")
"""A run compiles the kernels of its own formats: those of one, and of one block format."""
N, K = 5632, 2048
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS")


def ask_child(what: str, timeout_s: float, *, default_threads: bool = False) -> dict[str, Any]:
    """Run a measurement in a fresh interpreter.

    Args:
        what: "base" or "default_threads".
        timeout_s: it is killed after that.
        default_threads: leave out of its environment what tells OpenMP how to wait.

    Raises:
        StatedError: it failed or took too long.
    """
    environment = {name: value for name, value in os.environ.items() if not default_threads or name not in WAIT_VARIABLES}
    try:
        # The child is killed when this is interrupted or the time is over, so that its files must be ours to remove.
        with tempfile.TemporaryDirectory(prefix="lmoffload-profile-") as folder:
            command = [sys.executable, "-m", "lmoffload.profiler.child", what, folder]
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=True, text=True
            )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise StatedError(f"The measurement of {what} took more than {timeout_s:.0f} s.") from error
    except (subprocess.CalledProcessError, OSError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise StatedError(f"The measurement of {what} failed: {' '.join(last)}") from error
    return answer


def _base(folder: Path) -> dict[str, Any]:
    """Peak resident bytes after all that a run loads and compiles, for a model that is next to nothing."""
    from lmoffload.environment import prepare_allocator, prepare_threads

    prepare_threads()
    prepare_allocator()

    import torch

    torch.set_num_threads(1)
    from lmoffload.checkpoint import open_checkpoint
    from lmoffload.executor.process import peak_resident_bytes
    from lmoffload.kernels.linear import kernels_for, linear
    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.pool import Pool
    from lmoffload.profiler.tiny import decode_times, write_tiny_checkpoint
    from lmoffload.profiler.weights import random_blocks
    from lmoffload_solver.formats import stored_bytes

    checkpoint = open_checkpoint(write_tiny_checkpoint(folder))
    decode_times(checkpoint, rows=4, steps=8, threads=2, kernel=kernels_for("fp32")[0])
    with Pool(1) as pool:
        for format_name in BASE_FORMATS:
            matrix = Matrix(random_blocks(format_name)[: stored_bytes((64, 64), format_name)].clone(), format_name, 64, 64)
            for kernel in kernels_for(format_name):
                linear(torch.ones(4, 64), matrix, kernel, pool)
    return {"bytes": peak_resident_bytes()}


def _default_threads(_folder: Path) -> dict[str, Any]:
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


if __name__ == "__main__":
    print(json.dumps({"base": _base, "default_threads": _default_threads}[sys.argv[1]](Path(sys.argv[2]))))
