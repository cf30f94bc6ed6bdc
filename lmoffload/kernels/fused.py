"""Linear kernel: dot products that widen weights in registers."""

from __future__ import annotations

import torch

from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Scratch
from lmoffload.kernels.product import SCRATCH_ROW_BYTES, format_kernels
from lmoffload_solver.formats import FORMATS

PANEL_ROWS = 32
"""Weight rows widened together: 128 KiB of a second-level cache."""


class FusedDot:
    """Vector code of our own for every stored format; its bits never depend on the number of activation rows."""

    name = "fused_dot"
    formats = frozenset(FORMATS)
    least_rows = 1

    def __init__(self) -> None:
        self._scratch = Scratch()

    def prepare(self, matrix: Matrix) -> None:
        format_kernels(matrix.format)

    def unit(self, n: int, k: int) -> int:
        return PANEL_ROWS

    def product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        scratch = self._scratch.floats(PANEL_ROWS * SCRATCH_ROW_BYTES // 4)
        weight = matrix.data.data_ptr() + first_row * matrix.row_bytes
        target = out.data_ptr() + 4 * first_row
        product = format_kernels(matrix.format).product
        product(
            weight, matrix.row_bytes, end_row - first_row, x.data_ptr(), 4 * matrix.k, x.shape[0],
            target, 4 * out.stride(0), matrix.k, scratch.data_ptr(), PANEL_ROWS,
        )  # fmt: skip
