"""Linear kernel: dot products that widen weights in registers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lmoffload.kernels.board import Call
from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Job, Pool
from lmoffload.kernels.product import PANEL_ROWS, format_kernels
from lmoffload.kernels.tiled import TILE_ROWS, is_tiled, padded_tail
from lmoffload_solver.formats import FORMATS, QUANTIZED


class FusedDot:
    """Vector code of our own for every stored format; its bits never depend on the number of activation rows."""

    name = "fused_dot"
    formats = frozenset([*FORMATS, *QUANTIZED])
    least_rows = 1

    def prepare(self, matrix: Matrix) -> None:
        format_kernels(matrix.format)

    def unit(self, n: int, k: int) -> int:
        return PANEL_ROWS

    def activations(self, x: torch.Tensor, matrix: Matrix, pool: Pool) -> torch.Tensor:
        return x

    def jobs(self, x: torch.Tensor, matrix: Matrix, ranges: Sequence[tuple[int, int]], out: torch.Tensor) -> list[Job]:
        tile, row_bytes, entry = TILE_ROWS if is_tiled(matrix.format) else 1, matrix.row_bytes, format_kernels(matrix.format).entry
        weights, columns, keeps = matrix.data.data_ptr(), out.data_ptr(), (x, matrix.data, out)
        rest = x.data_ptr(), 4 * matrix.k, x.shape[0]
        out_row, whole_end = 4 * out.stride(0), ranges[-1][1] // tile * tile
        jobs: list[Job] = []
        for first, end in ranges:
            count = (min(end, whole_end) - first) // tile
            if count > 0:
                arguments = weights + first * row_bytes, tile * row_bytes, count, *rest, columns + 4 * first, out_row, matrix.k
                jobs.append(Call(entry, arguments, keeps))
        if whole_end < ranges[-1][1]:
            jobs.append(partial(_tail, x, matrix, out[:, whole_end:]))
        return jobs


def _tail(x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
    """The last tile, of fewer rows than a whole one."""
    tile, part = padded_tail(matrix.data, matrix.format, matrix.n, matrix.k), torch.empty(x.shape[0], TILE_ROWS)
    product = format_kernels(matrix.format).product
    tile_bytes = TILE_ROWS * matrix.row_bytes
    product(tile.data_ptr(), tile_bytes, 1, x.data_ptr(), 4 * matrix.k, x.shape[0], part.data_ptr(), 4 * TILE_ROWS, matrix.k)
    out[:] = part[:, : out.shape[1]]
