"""Repeated timing of one action: the median of its repetitions, and their spread (90th − 10th percentile) / median."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

UNSTEADY = 0.25
"""A reading whose spread exceeds this is marked."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one action."""

    median_s: float
    spread: float
    count: int

    @property
    def unsteady(self) -> bool:
        return self.spread > UNSTEADY


def summarize(times_s: Sequence[float]) -> Sample:
    """Median and spread of at least one time."""
    import numpy as np

    low, median, high = (float(q) for q in np.percentile(np.asarray(times_s), (10, 50, 90)))
    return Sample(median, (high - low) / median if median > 0 else 0.0, len(times_s))


def timed(action: Callable[[], object]) -> float:
    """Seconds that one run of `action` takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def repeat(
    action: Callable[[], object],
    budget_s: float,
    *,
    warmups: int = 1,
    at_least: int = 3,
    at_most: int = 200,
    clock: Callable[[Callable[[], object]], float] = timed,
) -> Sample:
    """Run `action` again and again until `budget_s` is spent, at least `at_least` times, after `warmups` runs that do not count.

    clock: runs it and says how many seconds count.
    """
    end = time.perf_counter() + budget_s
    for _ in range(warmups):
        action()
    times_s: list[float] = []
    while len(times_s) < at_least or (len(times_s) < at_most and time.perf_counter() < end):
        times_s.append(clock(action))
    return summarize(times_s)
