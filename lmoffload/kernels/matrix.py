"""A weight matrix as it is stored: bytes in a format, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmoffload.kernels.quantize import dequantize
from lmoffload.kernels.tiled import is_tiled, unpack
from lmoffload_solver.formats import format_of, stored_bytes


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [n, k] in its stored format; a view of memory that belongs to someone else.

    Attributes:
        data: uint8 [n * row_bytes], contiguous, beginning at any address.
        format: a name that `lmoffload_solver.formats.format_of` knows.
        n: rows (output features of the layer).
        k: columns (input features of the layer).
        row_order: int64 [n] or None; output column j of the layer is the stored row `row_order[j]`.
    """

    data: torch.Tensor
    format: str
    n: int
    k: int
    row_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.uint8 and self.data.dim() == 1 and self.data.is_contiguous(), "data is not a run of bytes"
        assert self.data.numel() == stored_bytes((self.n, self.k), self.format), "data has another size than the format asks for"
        assert self.row_order is None or self.row_order.shape == (self.n,), "row_order has another length than the matrix"

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row; rows of a tile share theirs."""
        fmt = format_of(self.format)
        return self.k // fmt.block_elements * fmt.block_bytes

    def rows(self, first: int, end: int) -> Matrix:
        """Stored rows first..end (exclusive) as a matrix of their own; only for matrices in their natural order, and whole tiles."""
        assert self.row_order is None, "pieces of a matrix with permuted rows have no order of their own"
        assert 0 <= first <= end <= self.n, "rows outside the matrix"
        tile = format_of(self.format).tile_rows
        assert first % tile == 0 and (end % tile == 0 or end == self.n), "a tile is never cut"
        return Matrix(self.data[first * self.row_bytes : end * self.row_bytes], self.format, end - first, self.k)


def reference_widen(matrix: Matrix) -> torch.Tensor:
    """The matrix as fp32 [n, k] with its row order applied, in plain torch.

    Blocks are ggml's, widened by the `gguf` package's own `quants.dequantize`. The quantized formats are those of `tiled`.
    """
    if is_tiled(matrix.format):
        wide = dequantize(unpack(matrix.data, matrix.format, matrix.n, matrix.k))
        return wide if matrix.row_order is None else wide[matrix.row_order]
    rows = matrix.data.clone().view(matrix.n, matrix.row_bytes)  # a clone is aligned; the view may not be
    wide = _widen_rows(rows, matrix.format).reshape(matrix.n, matrix.k)
    return wide if matrix.row_order is None else wide[matrix.row_order]


def _widen_rows(rows: torch.Tensor, format_name: str) -> torch.Tensor:
    if format_name == "fp32":
        return rows.view(torch.float32)
    if format_name == "bf16":
        return rows.view(torch.bfloat16).float()
    if format_name == "fp16":
        return rows.view(torch.float16).float()
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[format_name.upper()]))
