"""Memory: read bandwidth per number of threads, and the memory that measurements may fill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmoffload.profiler.limits import read_limits
from lmoffload.profiler.samples import repeat
from lmoffload_solver.machine import MemoryRate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lmoffload.kernels.pool import Pool

MIB = 1 << 20
BEYOND = 1.25
"""What is read in turn is this much larger than the last-level cache, so that nothing of it is left when its turn comes again."""
UNKNOWN_CACHE_BYTES = 256 * MIB
"""Read in turn where the kernel does not tell the size of the last-level cache."""
MEMORY_SHARE = 4
"""Measurements fill at most one part in this many of the usable memory."""


def rotation_bytes() -> tuple[int, bool]:
    """Bytes to rotate through, and whether that is beyond the last-level cache."""
    limits = read_limits()
    cache = limits.last_level_cache_bytes
    wanted = int(cache * BEYOND) if cache else UNKNOWN_CACHE_BYTES
    allowed = limits.memory_usable_bytes // MEMORY_SHARE
    return min(wanted, allowed) // MIB * MIB, allowed >= wanted and cache > 0


def memory_rates(pools: Sequence[Pool], budget_s: float) -> tuple[MemoryRate, ...]:
    """Bytes per second read from host memory, once per pool: an exclusive-or over 64-bit words, each thread over its own part."""
    import numpy as np

    num_bytes, _ = rotation_bytes()
    words = np.ones(max(MIB, num_bytes) // 8, np.int64)
    found = []
    for pool in pools:
        jobs = [partial(_read, part) for part in np.array_split(words, pool.threads)]
        sample = repeat(partial(pool.run, jobs), budget_s / len(pools))
        found.append(MemoryRate(tier="host", threads=pool.threads, bytes_per_s=words.nbytes / sample.median_s, spread=sample.spread))
    return tuple(found)


def _read(part: npt.NDArray[np.int64]) -> None:
    import numpy as np

    np.bitwise_xor.reduce(part)
