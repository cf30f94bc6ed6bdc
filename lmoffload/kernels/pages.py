"""Large results in large pages: the system otherwise clears and maps them 4 KiB at a time, which takes a fifth of a product's time."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch

LEAST_BYTES = 4 << 20
"""Two pages of the usual large size: below, none may fit between the ends."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of a shape, contents undefined; in large pages where it is large and the system has them. No byte more is taken."""
    tensor = torch.empty(shape, dtype=dtype)
    num_bytes, advice = tensor.nbytes, getattr(mmap, "MADV_HUGEPAGE", None)
    if num_bytes >= LEAST_BYTES and advice is not None:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)  # what it answers matters not: a wish
    return tensor


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
