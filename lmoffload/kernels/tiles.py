"""Linear kernel: widen a tile of weight rows that stays in the cache, then an fp32 product by torch's BLAS."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Job, Pool, Scratch, serial_torch
from lmoffload.kernels.product import format_kernels
from lmoffload.kernels.tiled import TILE_ROWS, is_tiled, padded_tail

TILE_BYTES = 4 << 20
"""fp32 bytes of a tile: 512 rows of 2,048 columns, the measured optimum on two machines."""

LEAST_TILES = 8

LEAST_ROWS = 4
MOST_ROWS = 128
"""Activation rows of one BLAS call. With fewer than 4 or more than 191, MKL sums in another order (measured)."""


class TileProduct:
    """A BLAS product over tiles; weights stored in fp32 are used where they lie.

    BLAS is called as out[n, m] = tile @ x.T: in this layout MKL gives a column the same bits for every m from 4 to 191.
    """

    least_rows = LEAST_ROWS

    def __init__(self, name: str, formats: frozenset[str]) -> None:
        self.name = name
        self.formats = formats
        self._tile, self._out = Scratch(), Scratch()

    def prepare(self, matrix: Matrix) -> None:
        if not in_place(matrix):
            format_kernels(matrix.format)

    def unit(self, n: int, k: int) -> int:
        return rows_of_tile(n, k)

    def activations(self, x: torch.Tensor, matrix: Matrix, pool: Pool) -> torch.Tensor:
        return x

    def jobs(self, x: torch.Tensor, matrix: Matrix, ranges: Sequence[tuple[int, int]], out: torch.Tensor) -> list[Job]:
        return [partial(self._product, x, matrix, first, end, out) for first, end in ranges]

    def _product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        tile_rows = rows_of_tile(matrix.n, matrix.k)
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
        if in_place(matrix):
            return matrix.data[start : end * matrix.row_bytes].view(torch.float32).view(end - first, matrix.k)
        tile = self._tile.floats((end - first) * matrix.k)
        widen = format_kernels(matrix.format).widen
        rest = end % TILE_ROWS if is_tiled(matrix.format) else 0
        widen(matrix.data.data_ptr() + start, matrix.row_bytes, end - first - rest, tile.data_ptr(), 4 * matrix.k, matrix.k)
        tile = tile.view(end - first, matrix.k)
        if rest:
            last, wide = padded_tail(matrix.data, matrix.format, matrix.n, matrix.k), torch.empty(TILE_ROWS, matrix.k)
            widen(last.data_ptr(), matrix.row_bytes, TILE_ROWS, wide.data_ptr(), 4 * matrix.k, matrix.k)
            tile[end - first - rest :] = wide[:rest]
        return tile


def in_place(matrix: Matrix) -> bool:
    """Whether BLAS can read the weights where they lie."""
    return matrix.format == "fp32" and matrix.data.data_ptr() % 4 == 0


def rows_of_tile(n: int, k: int) -> int:
    """Weight rows of a tile of a matrix [n, k]; at least LEAST_TILES tiles, so that several threads find work.

    It depends on the matrix alone: BLAS may sum otherwise for a tile of another height.
    """
    by_size = TILE_BYTES // (4 * k) // 16 * 16
    by_number = -(-n // LEAST_TILES // 16) * 16
    return max(16, min(by_size, by_number))


def steady_shape(n: int, k: int) -> bool:
    """Whether BLAS is steady for every tile of a matrix [n, k]."""
    tile = rows_of_tile(n, k)
    return all(blas_is_steady(height, k) for height in (min(n, tile), n % tile) if height)


@cache
def blas_is_steady(n: int, k: int) -> bool:
    """Whether BLAS gives a column of tile [n, k] @ x.T the same bits for every number of activation rows that is used.

    Tried on random numbers for a choice of row counts and places; about 10 ms for a full tile, once a shape.
    """
    generator = torch.Generator().manual_seed(n * k)
    tile, x = torch.randn(n, k, generator=generator), torch.randn(MOST_ROWS + 1, k, generator=generator)
    with serial_torch():
        whole = torch.mm(tile, x[:MOST_ROWS].T)
        for rows in (4, 5, 6, 7, 8, 12, 16, 17, 24, 33, 48, 65, 96, 127):
            start = (rows * 37) % (MOST_ROWS - rows)
            if not torch.equal(torch.mm(tile, x[start : start + rows].T), whole[:, start : start + rows]):
                return False
    return True
