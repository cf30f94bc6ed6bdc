"""Linear kernel: int8 activations, one scale for each group of a row, with int8 or int4 weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lmoffload.kernels.board import Call
from lmoffload.kernels.integer import integer_kernels
from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Job, Pool
from lmoffload.kernels.tiled import TILE_ROWS, padded_tail
from lmoffload.kernels.tokens import packed_row_bytes
from lmoffload_solver.formats import QUANTIZED

ACTIVATION_BYTES = 1 << 18
"""Packed activations that meet all tiles of a job together: they stay in a second-level cache beside the tile."""

JOB_ACTIVATIONS = 1 << 18
"""Activations worth a job of their own: about 50 microseconds."""


class Int8Dot:
    """Vector code of our own for the quantized formats; activations are rounded to int8 with a scale for each of the format's groups."""

    name = "int8_dot"
    formats = frozenset(QUANTIZED)
    least_rows = 1

    def prepare(self, matrix: Matrix) -> None:
        integer_kernels(matrix.format)

    def unit(self, n: int, k: int) -> int:
        return TILE_ROWS

    def activations(self, x: torch.Tensor, matrix: Matrix, pool: Pool) -> torch.Tensor:
        """x fp32 [M, K] packed: uint8 [M, packed_row_bytes]."""
        kernels = integer_kernels(matrix.format)
        rows, k = x.shape
        packed = torch.empty(rows, packed_row_bytes(k, QUANTIZED[matrix.format].block_elements), dtype=torch.uint8)
        together = _whole_blocks(JOB_ACTIVATIONS // k, kernels.block_rows)

        def pack(first: int, end: int) -> None:
            kernels.pack(x[first:].data_ptr(), 4 * k, end - first, packed[first:].data_ptr(), packed.shape[1], k)

        if rows <= together:
            pack(0, rows)
            return packed
        starts = range(0, rows, together)
        pool.run([partial(pack, first, min(first + together, rows)) for first in starts])
        return packed

    def jobs(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> Iterator[Job]:
        kernels, whole_end = integer_kernels(matrix.format), end_row // TILE_ROWS * TILE_ROWS
        if whole_end > first_row:
            address = matrix.data.data_ptr() + first_row * matrix.row_bytes
            for arguments in _blocks(x, matrix, address, (whole_end - first_row) // TILE_ROWS, out[:, first_row:]):
                yield Call(kernels.entry, arguments, (x, matrix.data, out))
        if whole_end < end_row:
            yield partial(_tail, x, matrix, out[:, whole_end:end_row])


def _tail(x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
    """The last tile, of fewer rows than a whole one."""
    tile, part = padded_tail(matrix.data, matrix.format, matrix.n, matrix.k), torch.empty(x.shape[0], TILE_ROWS)
    for arguments in _blocks(x, matrix, tile.data_ptr(), 1, part):
        integer_kernels(matrix.format).product(*arguments)
    out[:] = part[:, : out.shape[1]]


def _blocks(x: torch.Tensor, matrix: Matrix, address: int, num_tiles: int, out: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """The arguments of `IntegerKernels.product` for some tiles: as many activation rows at a time as stay in the cache."""
    (rows, packed_row), out_row = x.shape, 4 * out.stride(0)
    together = _whole_blocks(ACTIVATION_BYTES // packed_row, integer_kernels(matrix.format).block_rows)
    for first in range(0, rows, together):
        yield (
            address, TILE_ROWS * matrix.row_bytes, num_tiles, x.data_ptr() + first * packed_row, packed_row,
            min(together, rows - first), out.data_ptr() + first * out_row, out_row, matrix.k,
        )  # fmt: skip


def _whole_blocks(rows: int, block_rows: int) -> int:
    return max(1, rows // block_rows) * block_rows
