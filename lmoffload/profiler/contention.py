"""Contention: how much reading a disk and computing slow each other when both go on at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.profiler.disk_rates import Session, read_rate
from lmoffload.profiler.disk_target import opened
from lmoffload.profiler.limits import disk_of
from lmoffload.profiler.memory import rotation_bytes
from lmoffload.profiler.samples import summarize, timed
from lmoffload.profiler.weights import WeightSlab
from lmoffload_solver.machine import Contention
from lmoffload_solver.schedule import PAGE_BYTES, READ_REQUEST_BYTES

if TYPE_CHECKING:
    from lmoffload.kernels.pool import Pool

ROWS = 16
"""A decode step's rows: products bound by memory, which reading disturbs most."""
FILE_BYTES = 256 << 20
FORMATS = ("bf16", "int4-g64")
"""What most checkpoints are stored in, and what quantized weights mostly are: a quarter of the bytes from memory."""


def measure_contention(
    path: Path, pool: Pool, budget_s: float, read_threads: int, tell: Callable[[str], None] = lambda what: None
) -> tuple[Contention, ...]:
    """Reading with `read_threads` requests in flight, and linear layers on all of the pool: each alone, then both at once, for each of
    FORMATS.

    Raises:
        StatedError: no file can be made or found on that disk.
    """
    tell("reading and computing at once")
    each_s = budget_s / (1 + 2 * len(FORMATS))
    found = []
    with opened(path, disk_of(path).free_bytes, budget_s, FILE_BYTES) as target:
        num_bytes = read_threads * READ_REQUEST_BYTES // PAGE_BYTES * PAGE_BYTES
        session = Session.of(target, num_bytes, lambda what: None)
        read_alone = read_rate(session, READ_REQUEST_BYTES, read_threads, each_s)
        for format_name in FORMATS:
            compute = layer_product(pool, format_name)
            compute()  # compiles
            compute_alone_s = median_for(compute, each_s)
            with ThreadPoolExecutor(1) as reader:
                reading = reader.submit(read_rate, session, READ_REQUEST_BYTES, read_threads, each_s)
                compute_together_s = median_for(compute, each_s)
                while not reading.done():  # the reader's rate must be one of computing all along
                    compute()
                read_together = reading.result()
            slowdowns = {"first_slowdown": read_alone / read_together, "second_slowdown": compute_together_s / compute_alone_s}
            found.append(Contention(first="disk_read", second="host_compute", format=format_name, **slowdowns))
    return tuple(found)


def layer_product(pool: Pool, format_name: str) -> Callable[[], None]:
    """One layer-sized product with the format's fastest kernel for few rows."""
    import torch

    from lmoffload.kernels.linear import kernels_for, linear

    matrices = WeightSlab(rotation_bytes()[0] // 2).matrices(format_name, 5632, 2048)
    x = torch.randn(ROWS, 2048, generator=torch.Generator().manual_seed(0))
    best = min(kernels_for(format_name), key=lambda kernel: min(timed(lambda: linear(x, next(matrices), kernel, pool)) for _ in range(3)))

    def compute() -> None:
        linear(x, next(matrices), best, pool)

    return compute


def median_for(action: Callable[[], None], seconds: float) -> float:
    """Median seconds of an action repeated for a while."""
    end = time.perf_counter() + seconds
    times_s = [timed(action)]
    while time.perf_counter() < end:
        times_s.append(timed(action))
    return summarize(times_s).median_s
