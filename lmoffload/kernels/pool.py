"""A pool of threads that run serial kernels side by side."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

import torch

from lmoffload.kernels.board import Board, Call, Program
from lmoffload.kernels.pages import Pages
from lmoffload.kernels.runs import Later, Mark, Rooms, Runs

Job = Callable[[], object] | Call
Result = TypeVar("Result")


@contextmanager
def serial_torch() -> Iterator[None]:
    """torch's operators of this thread on one thread; as before afterwards."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


class Pool:
    """`threads` threads of computation: the caller of `run` and `threads - 1` workers that look for work for a millisecond, then sleep.

    `Call`s, of one function, come first and run without Python (`board`). The caller takes part, so that a pool of one costs nothing and
    a wake-up less is paid otherwise. While jobs run, torch's own threads are 1 in the workers and in the caller: the kernels' bits rest on
    serial products. Many short runs in a row may be done `together`.

    Args:
        threads: at least 1.
        cores: the cores to bind to, one for each thread, or None; the first is the caller's, who binds itself if it wants to.
    """

    def __init__(self, threads: int, cores: Sequence[int] | None = None) -> None:
        assert threads >= 1, "a pool needs a thread"
        assert cores is None or len(cores) >= threads, "a pool needs a core for each thread"
        self.threads = threads
        self._pages = Pages()
        self._running = threading.Lock()
        self._owner: int | None = None
        self._closed = False
        self._board = Board()
        self._later: Later | None = None
        self._workers = [_Worker(self._board, None if cores is None else cores[i]) for i in range(1, threads)]

    def run(self, jobs: Sequence[Job]) -> None:
        """Run every job, each on one of the threads; all have ended when this returns, but within `together`.

        Jobs are handed out in order as threads become free. They must not call `run` of the same pool. After an exception no further
        job is begun, and the first exception is raised here.
        """
        assert self._owner != threading.get_ident(), "a job called run() of the pool that runs it"
        if (later := self._mine) is not None:
            if later.take(jobs):
                return
            self.settle()
        with self._running:
            assert not self._closed, "the pool is closed"
            self._owner = threading.get_ident()
            try:
                with serial_torch():
                    self._run(jobs)
            finally:
                self._owner = None

    def together(self, work: Callable[[], Result], rooms: Rooms) -> tuple[Result, Runs | None]:
        """What `work` returns. Its runs that are all `Call`s are done in one go, in order, each when the one before has ended: at the end,
        at `settle`, or before any other run. What they write must not be read before, nor what they read be changed.

        rooms: where `empty` finds room for this work.

        Returns:
            The result, and the runs, for `again`; None where there was more than runs, so that doing them again would not be the same.
        """
        assert self._later is None, "work within work"
        later = self._later = Later(threading.get_ident(), rooms)
        try:
            result = work()
            runs, later.stages, later.marks = Runs.of(later.stages, later.marks), [], []
        finally:
            self._later = None
        self.again(runs)
        return result, None if later.was_settled else runs

    def again(self, runs: Runs) -> None:
        """Do what was done `together` once more, with what is in the same places now."""
        runs.begin_s = time.monotonic()
        ends_s = [runs.begin_s]
        if runs.program is not None:
            with self._running:
                assert not self._closed, "the pool is closed"
                self._board.lead(runs.program, self._rouse)
            ends_s += runs.program.ends_s
        for mark in runs.marks:
            mark.tell(mark.done_s + sum(share * (ends_s[stage + 1] - ends_s[stage]) for stage, share in mark.parts))

    def settle(self) -> None:
        """Do what was put off: what follows reads it, or changes it, otherwise than in a run."""
        if (later := self._mine) is not None:
            runs, later.stages, later.marks, later.was_settled = Runs.of(later.stages, later.marks), [], [], True
            self.again(runs)

    def timed(self, work: Callable[[], Result], tell: Callable[[float], None], size: float = 1.0) -> Result:
        """What `work` returns; `tell` hears the seconds that it takes, or those of its runs where they are put off: of what is done side by
        side, its share by size."""
        later, begin_s = self._mine, time.perf_counter()
        stages = [] if later is None else later.stages
        first = len(stages)
        result = work()
        seconds = time.perf_counter() - begin_s
        if later is None:
            tell(seconds)
        elif later.stages is stages:
            later.marks.append(Mark(tuple((stage, 1.0) for stage in range(first, len(stages))), size, 0.0, tell))
        else:  # some of it is done
            later.marks.append(Mark(tuple((stage, 1.0) for stage in range(len(later.stages))), size, seconds, tell))
        return result

    def beside(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """What works return of which none reads or writes what another one writes: where their runs are put off, the first ones of all are
        done side by side, then the second ones, ..."""
        later = self._mine
        if later is None:
            return [work() for work in works]
        stages, results, edges = later.stages, [], [len(later.stages)]
        for work in works:
            results.append(work())
            edges.append(len(later.stages))
        if later.stages is stages and edges[-1] > edges[0]:
            later.lay_abreast(list(pairwise(edges)))
        return results

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Room for what a run writes, contents undefined. Whole rows are written where the first dimension is rows."""
        return self._pages.empty(shape, dtype) if (later := self._mine) is None else later.rooms.take(shape, dtype)

    def give_back(self) -> None:
        """Give back to the system what is kept for results and in no use."""
        self._pages.give_back()

    @property
    def _mine(self) -> Later | None:
        """What this thread puts off, if it does."""
        return self._later if self._later is not None and self._later.thread == threading.get_ident() else None

    def _run(self, jobs: Sequence[Job]) -> None:
        calls = [job for job in jobs if isinstance(job, Call)]
        if calls:
            self._board.lead(Program.of([calls]), self._rouse)
        if len(calls) < len(jobs):
            self._run_python([job for job in jobs if not isinstance(job, Call)])

    def _rouse(self, count: int) -> None:
        for worker in self._workers[:count]:
            worker.rouse()

    def _run_python(self, jobs: Sequence[Callable[[], object]]) -> None:
        batch = _Batch(jobs)
        started: list[_Worker] = []
        try:
            for worker in self._workers[: max(0, len(jobs) - 1)]:
                worker.start(batch)
                started.append(worker)
            batch.work()
        except KeyboardInterrupt as error:
            batch.stop(error)
        for worker in started:
            while True:  # the jobs' buffers are the caller's: nobody leaves before all have ended, Ctrl-C included
                try:
                    worker.wait()
                    break
                except KeyboardInterrupt as error:
                    batch.stop(error)
        if batch.error is not None:
            raise batch.error

    @property
    def native_ids(self) -> tuple[int, ...]:
        """The kernel's numbers of the workers; the caller's own is not among them."""
        return tuple(worker.native_id for worker in self._workers)

    def close(self) -> None:
        """End the workers; a closed pool runs nothing. Closing twice is allowed."""
        with self._running:
            self._closed = True
            for worker in self._workers:
                worker.stop()
            self._workers = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def timed(pool: Pool | None, work: Callable[[], Result], tell: Callable[[float], None], size: float = 1.0) -> Result:
    """`Pool.timed`; without a pool, what `work` returns, and the seconds that it takes are told."""
    if pool is not None:
        return pool.timed(work, tell, size)
    begin_s = time.perf_counter()
    result = work()
    tell(time.perf_counter() - begin_s)
    return result


class Scratch(threading.local):
    """Memory of a kernel that each thread keeps from call to call: mapping fresh pages costs as much as filling them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def floats(self, count: int) -> torch.Tensor:
        """fp32 [count], contents undefined, valid until this thread asks again."""
        if self._memory.numel() < count:
            self._memory = torch.empty(0)  # the old piece goes before the new one comes
            self._memory = torch.empty(count)
        return self._memory[:count]


class _Batch:
    """The jobs of one `run`, taken one by one by whoever is free."""

    def __init__(self, jobs: Sequence[Callable[[], object]]) -> None:
        self._jobs = jobs
        self._next = itertools.count()
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            while self.error is None and (index := next(self._next)) < len(self._jobs):
                self._jobs[index]()
        except BaseException as error:
            self.stop(error)

    def stop(self, error: BaseException) -> None:
        """Begin no further job; the first error is the one that is told."""
        if self.error is None:
            self.error = error


class _Worker:
    """A thread that helps at the board, or is summoned for jobs in Python. What it sleeps on counts, so that no wake-up is lost."""

    def __init__(self, board: Board, core: int | None) -> None:
        self._board = board
        self._batch: _Batch | None = None
        self._summons = torch.zeros(1, dtype=torch.int64)
        self._asleep = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._done = threading.Lock()
        self._done.acquire()
        self._thread = threading.Thread(target=self._loop, args=(core,), name="lmoffload-compute", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        assert self._thread.native_id is not None
        return self._thread.native_id

    def rouse(self) -> None:
        """Have it look at the board."""
        if self._asleep:
            self._asleep = False
            self._wake.put(None)

    def start(self, batch: _Batch | None) -> None:
        self._batch = batch
        self._summons[0] = 1
        self.rouse()

    def wait(self) -> None:
        self._done.acquire()

    def stop(self) -> None:
        self.start(None)
        self._thread.join()

    def _loop(self, core: int | None) -> None:
        torch.set_num_threads(1)
        if core is not None:
            os.sched_setaffinity(0, {core})
        place = self._summons.data_ptr()
        while True:
            while not self._board.help(place):
                self._asleep = True
                if not (self._summons[0] or self._board.is_busy):  # since it looked: whoever came then may not have seen it asleep
                    self._wake.get()
                self._asleep = False
            self._summons[0] = 0
            batch = self._batch
            if batch is None:
                return
            batch.work()
            self._batch = batch = None  # a sleeping worker keeps no job, hence no tensor, alive
            self._done.release()
