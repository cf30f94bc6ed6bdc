"""Linear kernel: int8 activations, one scale for each group of a row, with int8 or int4 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from lmoffload.kernels.board import Call
from lmoffload.kernels.integer import MANY_ROWS, IntegerKernels, integer_kernels
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
        for many in (False, True):
            integer_kernels(matrix.format, many)

    def unit(self, n: int, k: int) -> int:
        return TILE_ROWS

    def activations(self, x: torch.Tensor, matrix: Matrix, pool: Pool) -> torch.Tensor:
        """x fp32 [M, K] packed: uint8 [M, packed_row_bytes]."""
        kernels, (rows, k) = _kernels(x, matrix), x.shape
        room = -(-rows // kernels.packed_multiple) * kernels.packed_multiple
        packed = pool.empty(room, packed_row_bytes(k, QUANTIZED[matrix.format].block_elements), dtype=torch.uint8)[:rows]
        together, keeps = _whole_blocks(JOB_ACTIVATIONS // k, kernels.block_rows), (x, packed)
        source, target, packed_row = x.data_ptr(), packed.data_ptr(), packed.shape[1]
        pool.run(
            [
                Call(
                    kernels.pack_entry,
                    (source + 4 * k * first, 4 * k, min(together, rows - first), target + packed_row * first, packed_row, k),
                    keeps,
                )
                for first in range(0, rows, together)
            ]
        )
        return packed

    def jobs(self, x: torch.Tensor, matrix: Matrix, ranges: Sequence[tuple[int, int]], out: torch.Tensor) -> list[Job]:
        entry, keeps = _kernels(x, matrix).entry, (x, matrix.data, out)
        whole_end = ranges[-1][1] // TILE_ROWS * TILE_ROWS
        whole = [(first, min(end, whole_end)) for first, end in ranges if first < whole_end]
        jobs: list[Job] = [Call(entry, arguments, keeps) for arguments in _blocks(x, matrix, matrix.data.data_ptr(), whole, out)]
        if whole_end < ranges[-1][1]:
            jobs.append(partial(_tail, x, matrix, out[:, whole_end:]))
        return jobs


def _kernels(x: torch.Tensor, matrix: Matrix) -> IntegerKernels:
    """Those for as many rows."""
    return integer_kernels(matrix.format, x.shape[0] >= MANY_ROWS)


def _tail(x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
    """The last tile, of fewer rows than a whole one."""
    tile, part = padded_tail(matrix.data, matrix.format, matrix.n, matrix.k), torch.empty(x.shape[0], TILE_ROWS)
    for arguments in _blocks(x, matrix, tile.data_ptr(), [(0, TILE_ROWS)], part):
        _kernels(x, matrix).product(*arguments)
    out[:] = part[:, : out.shape[1]]


def _blocks(
    x: torch.Tensor, matrix: Matrix, tiles: int, ranges: Sequence[tuple[int, int]], out: torch.Tensor
) -> Iterator[tuple[int, ...]]:
    """The arguments of `IntegerKernels.product` for ranges of rows of the tiles at an address: as many activation rows at a time as stay in
    the cache. Addresses are computed here and not by torch, which takes longer: after a product little of Python is in the cache."""
    (rows, packed_row), out_row, row_bytes = x.shape, 4 * out.stride(0), matrix.row_bytes
    together = _whole_blocks(ACTIVATION_BYTES // packed_row, _kernels(x, matrix).block_rows)
    x_place, out_place, tile_bytes, k = x.data_ptr(), out.data_ptr(), TILE_ROWS * row_bytes, matrix.k
    for first, end in ranges:
        here, tiles_here, column = tiles + first * row_bytes, (end - first) // TILE_ROWS, out_place + 4 * first
        for row in range(0, rows, together):
            number = min(together, rows - row)
            yield here, tile_bytes, tiles_here, x_place + row * packed_row, packed_row, number, column + row * out_row, out_row, k


def _whole_blocks(rows: int, block_rows: int) -> int:
    return max(1, rows // block_rows) * block_rows
