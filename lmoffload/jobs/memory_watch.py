"""Watches what memory is left while a job runs, so that it makes room instead of being killed."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from lmoffload.profiler.limits import usable_memory

LEAST_RESERVE_BYTES = 64 * 2**20
RESERVE_SHARE = 0.05
"""Of the plan's peak."""
LOOK_EVERY_S = 1.0


class MemoryWatch:
    """Says whether memory is short: less may still be taken than a reserve, and than what the plan has still to take.

    Args:
        peak_bytes: of the process, by the plan.
        usable: what may still be taken, in bytes; read from the system unless given.
    """

    def __init__(self, peak_bytes: int, usable: Callable[[], int] = usable_memory, every_s: float = LOOK_EVERY_S) -> None:
        self._peak_bytes, self._usable, self._every_s = peak_bytes, usable, every_s
        self._reserve = max(LEAST_RESERVE_BYTES, int(RESERVE_SHARE * peak_bytes))
        self._looked_s = time.monotonic()

    def short(self) -> bool:
        """Looks no more often than once in `every_s`."""
        if time.monotonic() - self._looked_s < self._every_s:
            return False
        self._looked_s = time.monotonic()
        to_take = self._peak_bytes - int(psutil.Process().memory_info().rss)
        return self._usable() < min(self._reserve, max(to_take, LEAST_RESERVE_BYTES // 4))
