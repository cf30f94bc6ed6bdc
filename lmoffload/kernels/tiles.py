"""Linear kernel: widen a tile of weight rows that stays in the cache, then an fp32 product by torch's BLAS."""

from __future__ import annotations

from functools import cache

import torch

from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Scratch
from lmoffload.kernels.product import format_kernels

TILE_BYTES = 4 << 20
"""fp32 bytes of a tile: 512 rows of 2,048 columns, the measured optimum on two machines."""

LEAST_ROWS = 4
MOST_ROWS = 128
"""Activation rows of one BLAS call. With fewer than 4 or more than 191, MKL sums in another order (measured)."""


class TileProduct:
    """A BLAS product over tiles; weights stored in fp32 are used where they lie.

    BLAS is called as out[n, m] = tile @ x.T: in this layout MKL gives a column the same bits for every m from 4 to 191.
    """

    def __init__(self, name: str, formats: frozenset[str]) -> None:
        self.name = name
        self.formats = formats
        self._tile, self._out = Scratch(), Scratch()

    def prepare(self, matrix: Matrix) -> None:
        format_kernels(matrix.format)

    def product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        tile_rows = rows_of_tile(matrix.k)
        for first in range(first_row, end_row, tile_rows):
            end = min(first + tile_rows, end_row)
            tile = self._widened(matrix, first, end)
            for begin in range(0, x.shape[0], MOST_ROWS):
                stop = min(begin + MOST_ROWS, x.shape[0])
                start = min(begin, stop - LEAST_ROWS)
                transposed = self._out.floats((end - first) * (stop - start)).view(end - first, stop - start)
                torch.mm(tile, x[start:stop].T, out=transposed)
                out[start:stop, first:end] = transposed.T

    def _widened(self, matrix: Matrix, first: int, end: int) -> torch.Tensor:
        start = first * matrix.row_bytes
        if matrix.format == "fp32" and matrix.data.data_ptr() % 4 == 0:
            return matrix.data[start : end * matrix.row_bytes].view(torch.float32).view(end - first, matrix.k)
        tile = self._tile.floats((end - first) * matrix.k)
        widen = format_kernels(matrix.format).widen
        widen(matrix.data.data_ptr() + start, matrix.row_bytes, end - first, tile.data_ptr(), 4 * matrix.k, matrix.k)
        return tile.view(end - first, matrix.k)


def rows_of_tile(k: int) -> int:
    """Weight rows of a tile of k columns."""
    return max(16, TILE_BYTES // (4 * k) // 16 * 16)


@cache
def blas_is_steady(n: int, k: int) -> bool:
    """Whether BLAS gives a column of tile [n, k] @ x.T the same bits for every number of activation rows that is used; a few ms."""
    generator = torch.Generator().manual_seed(n * k)
    tile, x = torch.randn(n, k, generator=generator), torch.randn(MOST_ROWS + 1, k, generator=generator)
    whole = torch.mm(tile, x[:MOST_ROWS].T)
    for rows in (4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 33, 48, 63, 64, 65, 96, 127):
        start = (rows * 37) % (MOST_ROWS - rows)
        if not torch.equal(torch.mm(tile, x[start : start + rows].T), whole[:, start : start + rows]):
            return False
    return True
