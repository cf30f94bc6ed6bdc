"""A checkpoint's tensor in another format, some rows at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from lmoffload.checkpoint.source import TensorSource, read_bytes
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import format_of
from lmoffload_solver.model import TensorShape

if TYPE_CHECKING:
    from lmoffload.checkpoint.checkpoint import Checkpoint

CHUNK_ELEMENTS = 1 << 20
"""Weights that are widened to fp32 together; some five copies of them are alive at once."""


class Digest(Protocol):
    """A hash of `hashlib`."""

    def update(self, data: memoryview[int], /) -> None: ...


def can_hold(tensor: TensorShape, format_name: str) -> bool:
    """Whether a tensor can be kept in a quantized format: a matrix whose rows are whole groups."""
    return tensor.can_become(format_name)


def encoded(
    checkpoint: Checkpoint, tensor: TensorShape, format_name: str, digest: Digest, squares: npt.NDArray[np.float32] | None = None
) -> Iterator[npt.NDArray[np.uint8]]:
    """Stored bytes of a tensor in `format_name`, piece by piece, rows in the parameter's order; `digest` is fed the bytes read.

    squares: how much each column counts (`importance`), fp32 [K].

    Memory is some megabytes, or the stored tensor where its rows lie in another order.

    Raises:
        StatedError: the file cannot be read, or the format cannot hold the weights.
    """
    import torch

    from lmoffload.kernels.matrix import Matrix, reference_widen
    from lmoffload.kernels.quantize import quantize

    source, k = checkpoint.source(tensor.name), tensor.shape[-1]
    rows, tile = prod(tensor.shape[:-1]), format_of(format_name).tile_rows
    row_bytes = source.num_bytes // rows
    together = max(tile, CHUNK_ELEMENTS // k // tile * tile)
    order = source.row_order
    counts = None if squares is None else torch.from_numpy(squares)
    whole = None
    if order is not None:
        whole = read_bytes(source, tensor.name, 0, source.num_bytes)
        digest.update(whole.data)
        whole = whole.reshape(rows, row_bytes)
    for first in range(0, rows, together):
        end = min(rows, first + together)
        if whole is None or order is None:
            stored = read_bytes(source, tensor.name, first * row_bytes, (end - first) * row_bytes)
            digest.update(stored.data)
        else:
            stored = whole[order[first:end]].reshape(-1)
        wide = reference_widen(Matrix(torch.from_numpy(stored), source.format, end - first, k))
        try:
            yield quantize(wide, format_name, counts).numpy()
        except StatedError as error:
            raise StatedError(f"The tensor {tensor.name} cannot be stored as {format_name}: {error}.") from error


def source_digest(source: TensorSource, name: str) -> str:
    """SHA-256 of a tensor's bytes in the checkpoint.

    Raises:
        StatedError: the file cannot be read.
    """
    digest, size = hashlib.sha256(), 4 * CHUNK_ELEMENTS
    for at in range(0, source.num_bytes, size):
        digest.update(read_bytes(source, name, at, min(size, source.num_bytes - at)).data)
    return digest.hexdigest()
