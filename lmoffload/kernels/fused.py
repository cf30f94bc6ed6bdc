"""Linear kernel: dot products that widen weights in registers."""

from __future__ import annotations

from collections.abc import Iterator
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

    def jobs(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> Iterator[Job]:
        tile = TILE_ROWS if is_tiled(matrix.format) else 1
        whole_end = end_row // tile * tile
        if whole_end > first_row:
            arguments = (
                matrix.data.data_ptr() + first_row * matrix.row_bytes, tile * matrix.row_bytes, (whole_end - first_row) // tile,
                x.data_ptr(), 4 * matrix.k, x.shape[0], out.data_ptr() + 4 * first_row, 4 * out.stride(0), matrix.k,
            )  # fmt: skip
            yield Call(format_kernels(matrix.format).entry, arguments, (x, matrix.data, out))
        if whole_end < end_row:
            yield partial(_tail, x, matrix, out[:, whole_end:end_row])


def _tail(x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
    """The last tile, of fewer rows than a whole one."""
    tile, part = padded_tail(matrix.data, matrix.format, matrix.n, matrix.k), torch.empty(x.shape[0], TILE_ROWS)
    product = format_kernels(matrix.format).product
    tile_bytes = TILE_ROWS * matrix.row_bytes
    product(tile.data_ptr(), tile_bytes, 1, x.data_ptr(), 4 * matrix.k, x.shape[0], part.data_ptr(), 4 * TILE_ROWS, matrix.k)
    out[:] = part[:, : out.shape[1]]
