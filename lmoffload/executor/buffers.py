"""Page-aligned memory outside the allocator: resident slabs and ring buffers."""

from __future__ import annotations

import torch

from lmoffload.kernels.pages import mapped


class Slab:
    """`num_bytes` of page-aligned anonymous memory, as a memoryview to read into and as a uint8 tensor to compute from."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mapped(num_bytes)
        self.view = memoryview(self._map)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
