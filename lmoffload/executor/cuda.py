"""A CUDA device: streams, events, page-locked slabs. Written from torch's documentation; not yet run on a GPU.

A queue is a thread that issues work to a stream of its own and never waits for the device: it waits until what a task depends on has been
issued, and lets its stream wait for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.resources import Event, HandledEvent, Queue, QueuedTask, ServedQueue, Tier
from lmoffload.executor.turns import take_short_turns
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import DeviceProcessor, Processor
from lmoffload_solver.errors import StatedError

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""


@dataclass(eq=False, kw_only=True)
class StreamEvent(HandledEvent):
    """The end of a task of a stream, which its thread issues; see `resources.Event`."""

    started: Any
    ended: Any
    base: Any
    """Recorded when `base_s` was read: times on the device are counted from it."""
    base_s: float

    @property
    def begin_s(self) -> float:
        return self.base_s + float(self.base.elapsed_time(self.started)) / 1e3

    @property
    def end_s(self) -> float:
        return self.base_s + float(self.base.elapsed_time(self.ended)) / 1e3

    @property
    def done(self) -> bool:
        return self.handled and (self.error is not None or bool(self.ended.query()))

    def wait(self) -> None:
        self.wait_handled()
        self.ended.synchronize()


class StreamQueue(ServedQueue[StreamEvent]):
    """A queue whose server is a stream, fed by a thread."""

    def __init__(self, name: str, device: torch.device, base: Any, base_s: float) -> None:
        self._device, self._base, self._base_s = device, base, base_s
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        super().__init__(name)

    def _new_event(self) -> StreamEvent:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return StreamEvent(started=started, ended=ended, base=self._base, base_s=self._base_s)

    def _enter(self) -> None:
        torch.cuda.set_device(self._device)
        take_short_turns()

    def _wait(self, before: Event) -> None:
        if isinstance(before, StreamEvent):
            before.wait_handled()
            self.stream.wait_event(before.ended)
        else:
            before.wait()

    def _perform(self, task: QueuedTask[StreamEvent]) -> None:
        with torch.cuda.stream(self.stream):
            task.event.started.record(self.stream)
            task.run()
            task.event.ended.record(self.stream)

    def _settle(self) -> None:
        self.stream.synchronize()


class CudaAccelerator:
    """See `resources.Accelerator`.

    Args:
        memory_bytes: what may be used of the device's memory; None: what is free.

    Raises:
        StatedError: there is no CUDA device.
    """

    emulated = False

    def __init__(self, memory_bytes: int | None = None, number: int = 0) -> None:
        if not torch.cuda.is_available():
            raise StatedError("This plan is for a CUDA device, and torch finds none here.")
        if number >= torch.cuda.device_count():
            raise StatedError(f"This plan is for {number + 1} CUDA devices, and torch finds {torch.cuda.device_count()} here.")
        self.device = torch.device("cuda", number)
        free, _ = torch.cuda.mem_get_info(self.device)
        self.memory = Tier("device", free if memory_bytes is None else min(free, memory_bytes), self._take)
        base: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        base.record(torch.cuda.current_stream(self.device))
        base.synchronize()
        base_s = time.perf_counter()
        self.compute: Queue = StreamQueue("device", self.device, base, base_s)
        self.upload: Queue = StreamQueue("upload", self.device, base, base_s)
        self.download: Queue = StreamQueue("download", self.device, base, base_s)
        self._locked: list[Slab] = []

    def page_locked(self, num_bytes: int) -> Slab:
        """A slab of exactly this size; torch's own pinned allocator would round it up to a power of two.

        Raises:
            StatedError: the system locks no more pages.
        """
        slab = Slab(num_bytes)
        code = int(torch.cuda.cudart().cudaHostRegister(slab.bytes.data_ptr(), slab.bytes.numel(), PORTABLE))  # type: ignore[no-untyped-call]
        if code != 0:
            raise StatedError(f"The system does not lock {num_bytes} bytes of memory for the device (CUDA error {code}).")
        self._locked.append(slab)
        return slab

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target, source, host=source)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target, source, host=target)

    def processor(self, pool: Pool, dtype: torch.dtype) -> Processor:
        return DeviceProcessor(self.device, dtype)

    def keep_for(self, tensor: torch.Tensor, queue: Queue) -> None:
        assert isinstance(queue, StreamQueue), "a queue of this accelerator"
        tensor.record_stream(queue.stream)

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def close(self) -> None:
        for stream_queue in (self.compute, self.upload, self.download):
            stream_queue.close()
        torch.cuda.synchronize(self.device)
        for slab in self._locked:
            torch.cuda.cudart().cudaHostUnregister(slab.bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._locked = []

    def _copy(self, target: torch.Tensor, source: torch.Tensor, host: torch.Tensor) -> None:
        """In the current stream of the calling thread; what pageable memory takes part in has ended on return."""
        target.copy_(source, non_blocking=True)
        if not host.is_pinned():
            torch.cuda.current_stream(self.device).synchronize()

    def _take(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
