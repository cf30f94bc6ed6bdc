"""A weight matrix as it is stored: bytes in a format, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmoffload.kernels.quantize import dequantize
from lmoffload.kernels.tiled import is_tiled, unpack
from lmoffload_solver.formats import FORMATS, format_of, stored_bytes


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

    Blocks are ggml's (https://github.com/ggml-org/ggml, ggml-common.h and `dequantize_row_*`): a block of 32 columns is an fp16 scale d
    (q4_1: then an fp16 minimum m) and the codes; q8_0 is d * code, q4_0 is d * (code - 8), q4_1 is d * code + m. Byte i of a 4-bit block
    holds column i in its low half and column i + 16 in its high half. The quantized formats are those of `tiled`.
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
    blocks = rows.view(rows.shape[0], -1, FORMATS[format_name].block_bytes)
    scale = blocks[..., 0:2].contiguous().view(torch.float16).float()
    if format_name == "q8_0":
        return scale * blocks[..., 2:].contiguous().view(torch.int8).float()
    start = 4 if format_name == "q4_1" else 2
    codes = torch.cat((blocks[..., start:] & 15, blocks[..., start:] >> 4), dim=-1).float()
    if format_name == "q4_0":
        return scale * (codes - 8)
    assert format_name == "q4_1", f"no reference widens {format_name}"
    return scale * codes + blocks[..., 2:4].contiguous().view(torch.float16).float()
