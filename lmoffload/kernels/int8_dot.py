"""Linear kernel: int8 activations, one scale for each group of a row, with int8 or int4 weights."""

from __future__ import annotations

from functools import partial

import torch

from lmoffload.kernels.integer import integer_kernels
from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Pool
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

        starts = range(0, rows, together)
        pool.run([partial(pack, first, min(first + together, rows)) for first in starts])
        return packed

    def product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        whole_end = end_row // TILE_ROWS * TILE_ROWS
        if whole_end > first_row:
            address = matrix.data.data_ptr() + first_row * matrix.row_bytes
            self._tiles(x, matrix, address, (whole_end - first_row) // TILE_ROWS, out.data_ptr() + 4 * first_row, out.stride(0))
        if whole_end < end_row:
            tile, part = padded_tail(matrix.data, matrix.format, matrix.n, matrix.k), torch.empty(x.shape[0], TILE_ROWS)
            self._tiles(x, matrix, tile.data_ptr(), 1, part.data_ptr(), TILE_ROWS)
            out[:, whole_end:end_row] = part[:, : end_row - whole_end]

    def _tiles(self, x: torch.Tensor, matrix: Matrix, address: int, num_tiles: int, out: int, out_stride: int) -> None:
        kernels, (rows, packed_row) = integer_kernels(matrix.format), x.shape
        together = _whole_blocks(ACTIVATION_BYTES // packed_row, kernels.block_rows)
        for first in range(0, rows, together):
            kernels.product(
                address, TILE_ROWS * matrix.row_bytes, num_tiles, x.data_ptr() + first * packed_row, packed_row,
                min(together, rows - first), out + 4 * first * out_stride, 4 * out_stride, matrix.k,
            )  # fmt: skip


def _whole_blocks(rows: int, block_rows: int) -> int:
    return max(1, rows // block_rows) * block_rows
