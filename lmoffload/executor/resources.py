"""Resources: what takes tasks, and what holds bytes. The one interface that the schedule, the buffers and the micro-batches know.

A queue is a serial server: it takes its tasks in the order they are enqueued, each when what it waits for has ended. A tier holds so many
bytes and no more. An accelerator is a tier with three queues, for computing and for copying each way. `host` has the queues of threads;
each accelerator has a file of its own.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    import torch

    from lmoffload.executor.buffers import Slab
    from lmoffload.kernels.pool import Pool
    from lmoffload.kernels.processor import Processor
    from lmoffload_solver.value import Tier as TierName


class Event(Protocol):
    """The end of a task."""

    @property
    def begin_s(self) -> float:
        """Seconds, by `time.perf_counter`, when the task began; known once it has ended."""

    @property
    def end_s(self) -> float: ...
    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block the calling thread until the task has ended; raises what ended it early."""


class Queue(Protocol):
    """A serial server of tasks."""

    @property
    def native_ids(self) -> tuple[int, ...]:
        """The kernel's numbers of its threads."""

    def enqueue(self, run: Callable[[], object], waits: Sequence[Event] = ()) -> Event:
        """Add a task that begins when all before it in this queue, and all that it waits for, have ended. Returns at once."""

    def discard(self) -> None:
        """Drop every task that has not begun, until `drain`."""

    def drain(self) -> None:
        """Wait until nothing is left; the queue takes tasks again."""

    def close(self) -> None:
        """Discard, and end the server."""


class DiscardedError(Exception):
    """A task was dropped before it began."""


@dataclass(eq=False)
class HandledEvent:
    """The end of what a thread does for a task; see `Event`."""

    error: BaseException | None = None
    _handled: threading.Event = field(default_factory=threading.Event)

    @property
    def handled(self) -> bool:
        """Whether the thread has done its part, or will never do it."""
        return self._handled.is_set()

    def wait_handled(self) -> None:
        """Block until then; raises what ended the task early."""
        self._handled.wait()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """The thread has done its part."""
        self._handled.set()


E = TypeVar("E", bound=HandledEvent)


@dataclass(slots=True)
class QueuedTask(Generic[E]):
    """What a queue has been given."""

    run: Callable[[], object]
    waits: Sequence[Event]
    event: E


class ServedQueue(ABC, Generic[E]):
    """A queue that a thread takes its tasks from; see `Queue`.

    What a task raises is raised to those who wait for it; tasks that do, and those behind it in the queue, end in the same way.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[QueuedTask[E] | None] = queue.SimpleQueue()
        self._discarding = threading.Event()
        self._failed: BaseException | None = None
        """What ended a task early since the queue was drained last."""
        self._thread = threading.Thread(target=self._serve, name=f"lmoffload-{name}", daemon=True)
        self._thread.start()

    @property
    def native_ids(self) -> tuple[int, ...]:
        return () if self._thread.native_id is None else (self._thread.native_id,)

    def enqueue(self, run: Callable[[], object], waits: Sequence[Event] = ()) -> E:
        task = QueuedTask(run, waits, self._new_event())
        self._tasks.put(task)
        return task.event

    def discard(self) -> None:
        self._discarding.set()

    def drain(self) -> None:
        last = self.enqueue(_nothing)
        with suppress(BaseException):  # told to those who waited for the task itself
            last.wait_handled()
        self._settle()
        self._failed = None
        self._discarding.clear()

    def close(self) -> None:
        self._discarding.set()
        self._tasks.put(None)
        self._thread.join()

    @abstractmethod
    def _new_event(self) -> E: ...

    @abstractmethod
    def _enter(self) -> None:
        """What the thread does first."""

    @abstractmethod
    def _wait(self, before: Event) -> None:
        """Let the task at hand begin after `before`."""

    @abstractmethod
    def _perform(self, task: QueuedTask[E]) -> None:
        """Do a task, all that it waits for said to have ended."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait for what the thread has begun and not waited for."""

    def _serve(self) -> None:
        self._enter()
        while (task := self._tasks.get()) is not None:
            self._do(task)
            del task  # a queue that waits keeps no task's tensors alive

    def _do(self, task: QueuedTask[E]) -> None:
        try:
            if self._discarding.is_set():
                raise DiscardedError
            if self._failed is not None:
                raise self._failed
            for before in task.waits:
                self._wait(before)
            self._perform(task)
        except BaseException as error:  # surfaces in the thread that waits
            task.event.error = self._failed = error
        finally:
            task.event.end()


def _nothing() -> None: ...


class Accelerator(Protocol):
    """A processor with a tier of its own."""

    emulated: bool
    device: torch.device
    memory: Tier
    compute: Queue
    upload: Queue
    download: Queue

    def page_locked(self, num_bytes: int) -> Slab:
        """Host memory that the copies reach."""

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes up, in a task of `upload`; of pageable memory, in any other: then it has been copied on return."""

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes down, in a task of `download`; to pageable memory, in any other: then it has been copied on return."""

    def processor(self, pool: Pool, dtype: torch.dtype) -> Processor:
        """Who computes. pool: threads, where the host's do. dtype: of the checkpoint."""

    def keep_for(self, tensor: torch.Tensor, queue: Queue) -> None:
        """A task of `queue` uses a tensor that another queue's task allocated (not from `memory`): when it is freed, its memory goes to
        nobody else before what `queue` has been given by then has ended."""

    def computing(self) -> AbstractContextManager[object]:
        """What tasks of `compute` run inside of, entered once for each."""

    def close(self) -> None:
        """End the queues and give the memory back."""


class Tier:
    """Memory of `capacity_bytes` (None: unlimited), whose use is counted."""

    def __init__(self, name: TierName, capacity_bytes: int | None, take: Callable[[int], torch.Tensor]) -> None:
        self.name, self.capacity_bytes = name, capacity_bytes
        self._take = take
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.peak_bytes = 0

    def allocate(self, num_bytes: int, what: str) -> torch.Tensor:
        """uint8 [num_bytes], zeros: masked attention reads what was never written, and must find numbers. `release` counts it as free.

        Raises:
            StatedError: the tier has not so much left.
        """
        self.charge(num_bytes, what)
        return self._take(num_bytes)

    def charge(self, num_bytes: int, what: str) -> None:
        """Count bytes that something else allocates in this tier.

        Raises:
            StatedError: the tier has not so much left.
        """
        with self._lock:
            used = self.used_bytes + num_bytes
            if self.capacity_bytes is not None and used > self.capacity_bytes:
                raise StatedError(
                    f"The {self.name} has {self.capacity_bytes} bytes, of which {self.used_bytes} are taken: "
                    f"{num_bytes} more for {what} do not fit; make a plan with less."
                )
            self.used_bytes = used
            self.peak_bytes = max(self.peak_bytes, used)

    def release(self, num_bytes: int) -> None:
        """Count bytes as free again."""
        with self._lock:
            self.used_bytes -= num_bytes
            assert self.used_bytes >= 0, "more was released than taken"
