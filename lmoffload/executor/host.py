"""Queues of the host: each a thread."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from lmoffload.executor.resources import Event


class DiscardedError(Exception):
    """A task was dropped before it began."""


@dataclass(slots=True, eq=False)
class HostEvent:
    """The end of a task of a thread; see `resources.Event`."""

    begin_s: float = 0.0
    end_s: float = 0.0
    error: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """The task has ended."""
        self._ended.set()


@dataclass(slots=True)
class _Task:
    run: Callable[[], object]
    waits: Sequence[Event]
    event: HostEvent


class ThreadQueue:
    """A queue whose server is a thread, bound to `cores` if any; see `resources.Queue`.

    What a task raises is raised to those who wait for it; tasks that do, and those behind it in the queue, end in the same way.
    """

    def __init__(self, name: str, cores: Sequence[int] = ()) -> None:
        self._cores = cores
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._discarding = threading.Event()
        self._failed: BaseException | None = None
        """What ended a task early since the queue was drained last."""
        self._thread = threading.Thread(target=self._serve, name=f"lmoffload-{name}", daemon=True)
        self._thread.start()

    @property
    def native_ids(self) -> tuple[int, ...]:
        return () if self._thread.native_id is None else (self._thread.native_id,)

    def enqueue(self, run: Callable[[], object], waits: Sequence[Event] = ()) -> HostEvent:
        task = _Task(run, waits, HostEvent())
        self._tasks.put(task)
        return task.event

    def discard(self) -> None:
        self._discarding.set()

    def drain(self) -> None:
        last = self.enqueue(_nothing)
        with suppress(BaseException):  # told to those who waited for the task itself
            last.wait()
        self._failed = None
        self._discarding.clear()

    def close(self) -> None:
        self._discarding.set()
        self._tasks.put(None)
        self._thread.join()

    def _serve(self) -> None:
        torch.set_num_threads(1)  # of this thread: parallelism is the pools'
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        while (task := self._tasks.get()) is not None:
            self._do(task)
            del task  # a queue that waits keeps no task's tensors alive

    def _do(self, task: _Task) -> None:
        event = task.event
        try:
            if self._discarding.is_set():
                raise DiscardedError
            if self._failed is not None:
                raise self._failed
            for before in task.waits:
                before.wait()
            event.begin_s = time.perf_counter()
            task.run()
            event.end_s = time.perf_counter()
        except BaseException as error:  # surfaces in the thread that waits
            event.error = self._failed = error
        finally:
            event.end()


def _nothing() -> None: ...
