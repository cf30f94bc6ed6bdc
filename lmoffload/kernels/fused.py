"""Linear kernel: dot products that widen weights in registers."""

from __future__ import annotations

import torch

from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Pool, Scratch
from lmoffload.kernels.product import SCRATCH_ROW_BYTES, format_kernels
from lmoffload.kernels.tiled import TILE_ROWS, is_tiled, padded_tail
from lmoffload_solver.formats import FORMATS, QUANTIZED

PANEL_ROWS = 32
"""Weight rows widened together: 128 KiB of a second-level cache."""


class FusedDot:
    """Vector code of our own for every stored format; its bits never depend on the number of activation rows."""

    name = "fused_dot"
    formats = frozenset([*FORMATS, *QUANTIZED])
    least_rows = 1

    def __init__(self) -> None:
        self._scratch = Scratch()

    def prepare(self, matrix: Matrix) -> None:
        format_kernels(matrix.format)

    def unit(self, n: int, k: int) -> int:
        return PANEL_ROWS

    def activations(self, x: torch.Tensor, matrix: Matrix, pool: Pool) -> torch.Tensor:
        return x

    def product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        if is_tiled(matrix.format):
            _tile_product(x, matrix, first_row, end_row, out)
            return
        scratch = self._scratch.floats(PANEL_ROWS * SCRATCH_ROW_BYTES // 4)
        weight = matrix.data.data_ptr() + first_row * matrix.row_bytes
        target = out.data_ptr() + 4 * first_row
        product = format_kernels(matrix.format).product
        product(
            weight, matrix.row_bytes, end_row - first_row, x.data_ptr(), 4 * matrix.k, x.shape[0],
            target, 4 * out.stride(0), matrix.k, scratch.data_ptr(), PANEL_ROWS,
        )  # fmt: skip


def _tile_product(x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
    """The same over tiles; first_row begins one."""
    whole_end, product = end_row // TILE_ROWS * TILE_ROWS, format_kernels(matrix.format).product
    tile_bytes, rows = TILE_ROWS * matrix.row_bytes, (x.data_ptr(), 4 * matrix.k, x.shape[0])
    if whole_end > first_row:
        address, target = matrix.data.data_ptr() + first_row * matrix.row_bytes, out.data_ptr() + 4 * first_row
        product(address, tile_bytes, (whole_end - first_row) // TILE_ROWS, *rows, target, 4 * out.stride(0), matrix.k)
    if whole_end < end_row:
        tile, part = padded_tail(matrix.data, matrix.format, matrix.n, matrix.k), torch.empty(x.shape[0], TILE_ROWS)
        product(tile.data_ptr(), tile_bytes, 1, *rows, part.data_ptr(), 4 * TILE_ROWS, matrix.k)
        out[:, whole_end:end_row] = part[:, : end_row - whole_end]
