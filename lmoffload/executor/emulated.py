"""The emulated accelerator: an arena of its capacity within host memory, a thread that computes, and copies each way held to a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.host import ThreadQueue
from lmoffload.executor.resources import Queue, Tier
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import HostProcessor, Processor

COPY_BYTES = 512 * 2**10
"""Copied at once; another copy of the same direction may come between."""

SHORT_S = 1e-4
"""Not worth a sleep of its own: it is slept with what follows."""

LATE_S = 2e-3
"""What a copy that begins so little after the link was free makes up for: sleeping overshoots."""


class HeldLink:
    """One direction of a link of `bytes_per_s`, taken by any thread."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.moved_bytes = 0
        self._lock = threading.Lock()
        self._free_s = 0.0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target uint8 [n], source uint8 [n]."""
        for first in range(0, source.numel(), COPY_BYTES):
            end, begin_s = min(source.numel(), first + COPY_BYTES), time.perf_counter()
            target[first:end].copy_(source[first:end])
            left = self._until(begin_s, end - first) - time.perf_counter()
            if left > SHORT_S:
                time.sleep(left)

    def _until(self, now: float, num_bytes: int) -> float:
        """When bytes that set out now may have passed."""
        with self._lock:
            begin = self._free_s if now - self._free_s < LATE_S else now
            self._free_s = begin + num_bytes / self.bytes_per_s
            self.moved_bytes += num_bytes
            return self._free_s


class EmulatedAccelerator:
    """See `resources.Accelerator`. What computes on it are the host's kernels, in its own thread and its own memory."""

    emulated = True
    device = torch.device("cpu")

    def __init__(
        self, memory_bytes: int, link_bytes_per_s: float, compute: Sequence[int] = (), staging: Sequence[int] = ()
    ) -> None:
        """compute, staging: cores of the thread that computes and of those that copy."""
        self.memory = Tier("device", memory_bytes, _arena)
        self.up, self.down = HeldLink(link_bytes_per_s), HeldLink(link_bytes_per_s)
        self.compute: Queue = ThreadQueue("device", compute, computes=True)
        self.upload: Queue = ThreadQueue("upload", staging)
        self.download: Queue = ThreadQueue("download", staging)

    def page_locked(self, num_bytes: int) -> Slab:
        return _touched(num_bytes)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.up.copy(target, source)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.down.copy(target, source)

    def processor(self, pool: Pool, dtype: torch.dtype) -> Processor:
        return HostProcessor(pool)

    def keep_for(self, tensor: torch.Tensor, queue: Queue) -> None:
        """Tasks end before they are said to have ended."""

    def computing(self) -> torch.no_grad:
        return torch.no_grad()

    def close(self) -> None:
        for queue in (self.compute, self.upload, self.download):
            queue.close()


def _arena(num_bytes: int) -> torch.Tensor:
    return _touched(num_bytes).bytes[:num_bytes]


def _touched(num_bytes: int) -> Slab:
    """Memory whose pages are there: mapping them takes longer than the copies that would be the first to touch them."""
    slab = Slab(num_bytes)
    slab.bytes.zero_()
    return slab
