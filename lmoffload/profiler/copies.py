"""Copies within host memory, and tasks handed between threads: what an emulated device is made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from lmoffload.profiler.contention import FORMATS, layer_product, median_for
from lmoffload.profiler.memory import MIB, rotation_bytes
from lmoffload.profiler.samples import repeat, timed
from lmoffload_solver.machine import Contention, MemoryRate

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.pool import Pool

COPY_BYTES = MIB // 2
"""Copied at once."""

HANDOVERS = 200
PAUSE_S = 1e-3
"""A thread that waits has fallen asleep by then."""


def copy_rates(pools: Sequence[Pool], budget_s: float) -> tuple[MemoryRate, ...]:
    """Bytes per second copied within host memory, once per pool, each thread within its own part."""
    source, target = _memories()
    found = []
    for pool in pools:
        parts = list(zip(source.chunk(pool.threads), target.chunk(pool.threads), strict=True))
        jobs = [partial(copy, one, other) for one, other in parts]
        sample = repeat(partial(pool.run, jobs), budget_s / len(pools))
        found.append(MemoryRate(tier="host", threads=pool.threads, bytes_per_s=source.numel() / sample.median_s, spread=sample.spread))
    return tuple(found)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Bytes of equal number, so many at once as copies between tiers take."""
    for first in range(0, source.numel(), COPY_BYTES):
        target[first : first + COPY_BYTES].copy_(source[first : first + COPY_BYTES])


def handover_s() -> float:
    """Seconds from a task's being handed to a sleeping thread to its end being seen by another that slept for it: half of each."""
    from lmoffload.executor.host import ThreadQueue

    queue = ThreadQueue("profile")
    try:

        def once() -> float:
            time.sleep(PAUSE_S)
            return timed(lambda: queue.enqueue(_nothing).wait())

        return sorted(once() for _ in range(HANDOVERS))[HANDOVERS // 2] / 2
    finally:
        queue.close()


def copy_contention(pool: Pool, budget_s: float) -> Contention:
    """A thread that copies without pause, and linear layers on all of the pool: each alone, then both at once."""
    source, target = _memories()
    places = cycle(range(0, source.numel() - 16 * MIB + 1, 16 * MIB))
    each_s = budget_s / 3

    def some() -> None:
        first = next(places)
        copy(source[first : first + 16 * MIB], target[first : first + 16 * MIB])

    compute = layer_product(pool, FORMATS[0])
    compute()  # compiles
    copy_alone, compute_alone = median_for(some, each_s), median_for(compute, each_s)
    with ThreadPoolExecutor(1) as copier:
        copying = copier.submit(median_for, some, each_s)
        compute_together = median_for(compute, each_s)
        while not copying.done():  # copies must be of computing all along
            compute()
    return Contention(
        first="copy",
        second="host_compute",
        first_slowdown=copying.result() / copy_alone,
        second_slowdown=compute_together / compute_alone,
        format=FORMATS[0],
    )


def _memories() -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    num_bytes = max(16 * MIB, rotation_bytes()[0] // 2)
    return torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)


def _nothing() -> None:
    pass
