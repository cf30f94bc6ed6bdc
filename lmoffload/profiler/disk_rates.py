"""Rates of a disk against request size and requests in flight, and the check that no cache gave them."""

from __future__ import annotations

import itertools
import mmap
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lmoffload.profiler.cgroups import read_table
from lmoffload.profiler.curves import curve_of
from lmoffload.profiler.disk_target import MIB, Target, Way
from lmoffload.profiler.samples import UNSTEADY, Sample, repeat, summarize, timed
from lmoffload_solver.machine import TransferCurve
from lmoffload_solver.schedule import PAGE_BYTES, READ_REQUEST_BYTES

PLACES = 3
"""Start, middle and end of the file, in turn."""
RUN_BYTES = 64 * MIB
"""Neighbouring bytes read before the next place."""
WINDOW_S = 0.2
"""Two of the slices over which the kernel keeps a limit on a disk."""
START_S = 0.2
REQUEST_WEIGHT = 3
"""The size that runs read with gets this many times the time of another: predictions rest on it."""
COUNTED = 0.95
"""The part of the bytes that the kernel must have counted as read from the device."""


@dataclass
class Session:
    """A target, memory for its requests, and what has been seen of it."""

    target: Target
    memory: memoryview
    tell: Callable[[str], None]
    remarks: list[str] = field(default_factory=list)

    @staticmethod
    def of(target: Target, num_bytes: int, tell: Callable[[str], None]) -> Session:
        """A session with memory for `num_bytes` of requests at once, in whole pages."""
        memory = mmap.mmap(-1, max(PAGE_BYTES, num_bytes // PAGE_BYTES * PAGE_BYTES))
        return Session(target, memoryview(memory), tell)


def transfer_curves(
    session: Session, way: Way, sizes: Sequence[int], in_flight: Sequence[int], budget_s: float
) -> tuple[TransferCurve, ...]:
    """One curve for each number of requests in flight; sizes that do not fit memory or the file are left out."""
    found: list[TransferCurve] = []
    weights = {size: REQUEST_WEIGHT if size == READ_REQUEST_BYTES else 1 for size in sizes}
    share_s = budget_s / len(in_flight) / sum(weights.values())
    for threads in in_flight:
        fitting = [size for size in sizes if size * threads <= len(session.memory)]
        session.tell(f"disk {way}, {threads} in flight")
        with ThreadPoolExecutor(threads) as pool:
            samples = [_Stream(session, way, size, threads).sample(pool, share_s * weights[size]) for size in fitting]
        if fitting:
            found.append(TransferCurve(threads=threads, bytes_per_s=curve_of(fitting, fitting, samples, law=True)))
    return tuple(found)


def stream_sample(ended_s: Sequence[float], threads: int) -> Sample:
    """Time per request of a stream whose requests ended at these seconds (ascending, more than 2 · `threads` of them), `threads` in flight.

    The requests done, a line between the ends, are read off at the edges of equal windows; the start, where a limit may grant a burst, is
    left out. Windows are of time, and no shorter than the slices over which the kernel keeps limits: such a limit lets requests through in
    bursts, of which windows of equal counts see the inside.
    """
    import numpy as np

    first, last = ended_s[threads - 1], ended_s[-1]
    begin = max(first, min(START_S, last / 4))
    done_at_begin, done = np.interp([begin, last], ended_s, range(len(ended_s)))
    gap_s = (last - begin) / (done - done_at_begin)
    windows = max(3, int((last - begin) / max(WINDOW_S, threads * gap_s)))
    edges = np.linspace(begin, last, windows + 1)
    moved = np.diff(np.interp(edges, ended_s, range(len(ended_s))))
    return summarize([float(t) for t in np.diff(edges) / moved])


def read_rate(session: Session, size: int, threads: int, seconds: float) -> float:
    """Bytes per second of a stream of reads."""
    with ThreadPoolExecutor(threads) as pool:
        return size / _Stream(session, "read", size, threads).sample(pool, seconds).median_s


class _Stream:
    """Requests of one size, `threads` of them in flight without a pause, as a run makes them.

    A pause would falsify the rate: what a limit of the kernel grants meanwhile comes for nothing afterwards.
    """

    def __init__(self, session: Session, way: Way, size: int, threads: int) -> None:
        self._session, self._way, self._size, self._threads = session, way, size, threads
        self._slots = session.target.num_bytes // size
        self._next = itertools.count()
        self._ended_s: list[float] = []
        self._failed = False

    def sample(self, pool: ThreadPoolExecutor, budget_s: float) -> Sample:
        """Time per request, as the median over windows of the stream."""
        begin = time.perf_counter()
        end = begin + budget_s
        jobs = [pool.submit(self._work, self._session.memory[i * self._size : (i + 1) * self._size], end) for i in range(self._threads)]
        try:
            for job in jobs:
                job.result()
        finally:
            self._failed = True
        return stream_sample([time_s - begin for time_s in sorted(self._ended_s)], self._threads)

    def _work(self, buffer: memoryview, end: float) -> None:
        least = (PLACES + 1) * self._threads
        while not self._failed and (time.perf_counter() < end or len(self._ended_s) < least):
            try:
                self._session.target.request(self._way, self._offset(next(self._next)), buffer)
            except BaseException:
                self._failed = True
                raise
            self._ended_s.append(time.perf_counter())

    def _offset(self, index: int) -> int:
        """Runs of neighbouring requests from the start, the middle and the end of the file in turn."""
        run = max(self._threads, RUN_BYTES // self._size)
        third = max(1, self._slots // PLACES)
        rounds, place, within = index // (PLACES * run), index // run % PLACES, index % run
        return min(place * third + (rounds * run + within) % third, self._slots - 1) * self._size


def is_cache_excluded(session: Session, budget_s: float) -> bool:
    """Read places across the file twice: the second reading must not be faster, and the kernel must have counted every byte as read
    from the device."""
    session.tell("disk, second reading of the same places")
    size = min(4 * MIB, len(session.memory), session.target.num_bytes // 4) // PAGE_BYTES * PAGE_BYTES
    buffer = session.memory[:size]
    places = random.Random(0).sample(range(session.target.num_bytes // size), k=min(16, session.target.num_bytes // size))
    before, end = _kernel_read_bytes(), time.perf_counter() + budget_s
    first: list[float] = []
    second: list[float] = []
    for place in places:
        for times_s in (first, second):
            times_s.append(timed(partial(session.target.request, "read", place * size, buffer)))
        if len(first) >= PLACES and time.perf_counter() > end:
            break
    after, requested = _kernel_read_bytes(), (len(first) + len(second)) * size
    one, two = summarize(first), summarize(second)
    if before is not None and after is not None and after - before < COUNTED * requested:
        session.remarks.append("The disk's rates may include a cache: the kernel did not count every byte as read from the device.")
        return False
    if one.median_s > two.median_s * (1 + max(UNSTEADY, one.spread, two.spread)):
        times = one.median_s / two.median_s
        session.remarks.append(f"The disk's rates may include a cache: a second reading of the same places was {times:.1f} times faster.")
        return False
    return True


def random_read(session: Session, budget_s: float) -> Sample:
    """One read of a block at a random place, alone."""
    session.tell("disk, random reads")
    chance = random.Random(1)
    blocks, buffer = session.target.num_bytes // PAGE_BYTES, session.memory[:PAGE_BYTES]

    def read_one() -> None:
        session.target.request("read", chance.randrange(blocks) * PAGE_BYTES, buffer)

    return repeat(read_one, budget_s, at_least=20, at_most=2000)


def random_write(session: Session, budget_s: float) -> Sample:
    """One page written in place at a random place, alone."""
    session.tell("disk, random writes")
    chance = random.Random(2)
    blocks, buffer = session.target.num_bytes // PAGE_BYTES, session.memory[:PAGE_BYTES]

    def write_one() -> None:
        session.target.request("write", chance.randrange(blocks) * PAGE_BYTES, buffer)

    return repeat(write_one, budget_s, at_least=20, at_most=2000)


def _kernel_read_bytes() -> int | None:
    """Bytes that the kernel fetched from devices for this process; None where it does not say."""
    return read_table(Path("/proc/self/io")).get("read_bytes:")
