"""Copies within host memory, and tasks handed between threads: what an emulated device is made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from lmoffload.profiler.contention import FORMATS, layer_product, median_for
from lmoffload.profiler.memory import MIB, rotation_bytes
from lmoffload.profiler.samples import repeat, summarize, timed
from lmoffload_solver.machine import Contention, MemoryRate

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.pool import Pool

COPY_BYTES = MIB // 2
"""Copied at once."""

HELD_BYTES_PER_S = (2.5e8, 1e9)
"""Rates of slow links; beyond them copies go as fast as they can."""

IDLE_S, IDLES = (0.04, 0.16, 0.4), 3
WARM_S = 0.06
"""Of computing: cores that were idle are as fast as ever by then."""

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


def copy_contention(pool: Pool, fastest: float, budget_s: float) -> tuple[Contention, ...]:
    """Copies held to a rate, up to `fastest` bytes per second, and linear layers on all of the pool at once, against each alone."""
    from lmoffload.executor.emulated import HeldLink
    from lmoffload.executor.turns import take_short_turns

    source, target = _memories()
    compute = layer_product(pool, FORMATS[0])
    compute()  # compiles
    alone_s = median_for(compute, budget_s / 4)
    found = []
    for rate in (*(rate for rate in HELD_BYTES_PER_S if rate < fastest), fastest):
        link, end_s = HeldLink(rate), budget_s / 4
        num_bytes = min(source.numel(), max(4 * COPY_BYTES, round(rate * end_s)))
        with ThreadPoolExecutor(1, initializer=take_short_turns) as copier:
            copying = copier.submit(timed, partial(link.copy, target[:num_bytes], source[:num_bytes]))
            times = [timed(compute)]
            while not copying.done():
                times.append(timed(compute))
        slow = {"first_slowdown": copying.result() * rate / num_bytes, "second_slowdown": summarize(times).median_s / alone_s}
        found.append(Contention(first="copy", second="host_compute", format=FORMATS[0], first_per_s=rate, **slow))
    return tuple(found)


def waking(pool: Pool) -> tuple[tuple[float, float], ...]:
    """Seconds that products lose after nothing was computed for a while: a number of them then, against as many with none before."""
    compute = layer_product(pool, FORMATS[0])
    compute()  # compiles
    one_s = median_for(compute, WARM_S)
    count = max(1, round(WARM_S / one_s))

    def some() -> None:
        for _ in range(count):
            compute()

    lost = [(0.0, 0.0)]
    for idle_s in IDLE_S:
        losses = []
        for _ in range(IDLES):
            some()
            warm_s = timed(some)
            time.sleep(idle_s)
            losses.append(timed(some) - warm_s)
        lost.append((idle_s, max(lost[-1][1], sorted(losses)[IDLES // 2])))
    return tuple(lost[1:])


def _memories() -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    num_bytes = max(16 * MIB, rotation_bytes()[0] // 2)
    return torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)


def _nothing() -> None:
    pass
