"""Resources: what takes tasks, and what holds bytes. The one interface that the schedule, the buffers and the micro-batches know.

A queue is a serial server: it takes its tasks in the order they are enqueued, each when what it waits for has ended. A tier holds so many
bytes and no more. An accelerator is a tier with three queues, for computing and for copying each way. `host` has the queues of threads;
each accelerator has a file of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

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
