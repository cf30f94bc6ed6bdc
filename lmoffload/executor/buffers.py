"""Page-aligned memory outside the allocator: resident slabs and ring buffers."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 * 2**20
"""Reading weights and keys from huge pages is 10 to 18 % faster (docs/log.md)."""


class Slab:
    """`num_bytes` of page-aligned anonymous memory, as a memoryview to read into and as a uint8 tensor to compute from."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        size, private = max(num_bytes, mmap.PAGESIZE), getattr(mmap, "MAP_PRIVATE", None)
        if private is None:
            self._map = mmap.mmap(-1, size)
        else:  # shared memory, which is Python's default, gets huge pages on few systems
            self._map = mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS)
        if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
