"""A torch device without streams, torch's CPU above all: what computes on a real device runs there, one task after another.

It stands in for a real one where there is none: a plan for a real device is run by the same processor, in the same dtype.
"""

from __future__ import annotations

import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.host import ThreadQueue
from lmoffload.executor.resources import Queue, Tier
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import DeviceProcessor, Processor


class PlainDevice:
    """See `resources.Accelerator`.

    Args:
        memory_bytes: what may be used.
        device: of torch.
    """

    emulated = False

    def __init__(self, memory_bytes: int | None = None, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.memory = Tier("device", memory_bytes, self._zeros)
        self.compute: Queue = ThreadQueue("device", computes=True)
        self.upload: Queue = ThreadQueue("upload")
        self.download: Queue = ThreadQueue("download")

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def page_locked(self, num_bytes: int) -> Slab:
        return Slab(num_bytes)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def processor(self, pool: Pool, dtype: torch.dtype) -> Processor:
        return DeviceProcessor(self.device, dtype)

    def keep_for(self, tensor: torch.Tensor, queue: Queue) -> None:
        """Tasks end before they are said to have ended."""

    def computing(self) -> torch.no_grad:
        return torch.no_grad()

    def close(self) -> None:
        for queue in (self.compute, self.upload, self.download):
            queue.close()
