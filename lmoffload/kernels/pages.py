"""Large results in memory that is used again, and in large pages: the system clears and maps what it gives anew, which takes a fifth of a
product's time, and several times as long where the page cache has cut free memory to pieces."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import prod

import torch

HUGE_PAGE_BYTES = 2 << 20
"""Reading weights and keys from huge pages is 10 to 18 % faster (docs/log.md)."""

LEAST_BYTES = 2 * HUGE_PAGE_BYTES
"""Of a result that is kept: below, the heap keeps what is freed."""

LOOSE = 1.25
"""How many times as large as what is wanted a piece may be that is taken first."""


class Pages:
    """Pieces of memory that results are put into. What a result leaves is kept for others; what is kept and in use together never comes to
    more than was in use at once."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        """The smallest first."""
        self._left: deque[mmap.mmap] = deque()
        """By results that are gone, in any thread."""
        self._used_bytes = 0
        self._most_bytes = 0
        """In use at once, since all was given back last."""

    @property
    def kept_bytes(self) -> int:
        """In no use."""
        self._gather()
        return sum(map(len, self._free))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of a shape, contents undefined. One thread takes them, any may drop them."""
        count = prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes < LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        piece = self._piece(num_bytes)
        self._used_bytes += len(piece)
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        view = memoryview(piece)  # lives as long as the tensor's storage
        weakref.finalize(view, partial(self._left.append, piece)).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=count).view(tuple(shape))

    def give_back(self) -> None:
        """Give back to the system what is in no use."""
        self._gather()
        self._free.clear()
        self._most_bytes = self._used_bytes

    def _gather(self) -> None:
        while self._left:
            piece = self._left.popleft()
            self._used_bytes -= len(piece)
            self._free.append(piece)
        self._free.sort(key=len)

    def _piece(self, num_bytes: int) -> mmap.mmap:
        """One that fits, of what is kept; else a new one if that makes no more than was in use at once; else one that is too large; else a
        new one in place of the smallest."""
        self._gather()
        index = next((i for i, piece in enumerate(self._free) if len(piece) >= num_bytes), None)
        if index is not None:
            kept = sum(map(len, self._free)) + self._used_bytes
            if len(self._free[index]) <= LOOSE * num_bytes or kept + num_bytes > self._most_bytes:
                return self._free.pop(index)
        most = max(self._most_bytes, self._used_bytes + num_bytes)
        while self._free and self._used_bytes + sum(map(len, self._free)) + num_bytes > most:
            del self._free[0]
        return mapped(num_bytes)


def mapped(num_bytes: int) -> mmap.mmap:
    """Whole pages of anonymous memory, in large ones where there is room for one and the system has them."""
    size, private = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE, getattr(mmap, "MAP_PRIVATE", None)
    if private is None:
        piece = mmap.mmap(-1, size)
    else:  # shared memory, which is Python's default, gets huge pages on few systems
        piece = mmap.mmap(-1, size, flags=private | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
