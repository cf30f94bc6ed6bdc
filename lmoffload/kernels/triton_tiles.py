"""Triton kernels over the quantized formats of `tiled`: widen a matrix, and the product that dequantizes in its inner loop.

Not yet run on a GPU; tested in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.tiled import TILE_ROWS
from lmoffload_solver.formats import QUANTIZED

PRODUCT_ROWS = 16
"""Rows of activations of one program: the least that a tensor core's product takes."""


@triton.jit  # type: ignore[untyped-decorator]
def _weights(data, halves, n, k, tile, group, GROUP: tl.constexpr, BLOCK_BYTES: tl.constexpr, FOUR: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 [16, GROUP] of one group of a tile; rows beyond the matrix are zeros."""
    height = tl.minimum(16, n - tile * 16)
    base = tile.to(tl.int64) * 16 * (k // GROUP) * BLOCK_BYTES + group * height * BLOCK_BYTES
    row, column = tl.arange(0, 16), tl.arange(0, GROUP)
    live = row < height
    scale = tl.load(halves + base // 2 + row, mask=live, other=0.0).to(tl.float32)
    if FOUR:
        minimum = tl.load(halves + base // 2 + height + row, mask=live, other=0.0).to(tl.float32)
        place = base + 4 * height + (column // 8)[None, :] * (4 * height) + row[:, None] * 4 + (column % 4)[None, :]
        both = tl.load(data + place, mask=live[:, None], other=0).to(tl.int32)
        code = (both >> ((column % 8) // 4 * 4)[None, :]) & 15
        return code.to(tl.float32) * scale[:, None] + minimum[:, None]
    place = base + 2 * height + (column // 4)[None, :] * (4 * height) + row[:, None] * 4 + (column % 4)[None, :]
    code = tl.load(data + place, mask=live[:, None], other=0).to(tl.int8, bitcast=True)
    return code.to(tl.float32) * scale[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _widen(data, halves, out, n, k, GROUP: tl.constexpr, BLOCK_BYTES: tl.constexpr, FOUR: tl.constexpr):  # type: ignore[no-untyped-def]
    tile, group = tl.program_id(0), tl.program_id(1)
    wide = _weights(data, halves, n, k, tile, group, GROUP, BLOCK_BYTES, FOUR)
    row, column = tile * 16 + tl.arange(0, 16), group * GROUP + tl.arange(0, GROUP)
    place = row.to(tl.int64)[:, None] * k + column[None, :]
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=(row < n)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _product(x, data, halves, out, m, n, k, GROUP: tl.constexpr, BLOCK_BYTES: tl.constexpr, FOUR: tl.constexpr):  # type: ignore[no-untyped-def]
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = part * 16 + tl.arange(0, 16)
    total = tl.zeros((16, 16), dtype=tl.float32)
    for group in range(0, k // GROUP):
        wide = _weights(data, halves, n, k, tile, group, GROUP, BLOCK_BYTES, FOUR)
        place = rows[:, None] * k + group * GROUP + tl.arange(0, GROUP)[None, :]
        taken = tl.load(x + place, mask=(rows < m)[:, None], other=0.0)
        total += tl.dot(taken, tl.trans(wide.to(taken.dtype)), out_dtype=tl.float32)
    columns = tile * 16 + tl.arange(0, 16)
    place = rows[:, None] * n + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


def widen_tiles(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] in a floating dtype, in stored row order; the reference is `quantize.dequantize` of `tiled.unpack`."""
    data, settings = _settings(matrix)
    out = torch.empty(matrix.n, matrix.k, dtype=dtype, device=data.device)
    grid = (triton.cdiv(matrix.n, TILE_ROWS), matrix.k // settings["GROUP"])
    _widen[grid](data, data.view(torch.float16), out, matrix.n, matrix.k, **settings)
    return out


def tile_product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """x [M, K] contiguous times the matrix [N, K] -> [M, N] of x's dtype, in stored row order; weights are rounded to x's dtype."""
    data, settings = _settings(matrix)
    out = torch.empty(x.shape[0], matrix.n, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(matrix.n, TILE_ROWS), triton.cdiv(x.shape[0], PRODUCT_ROWS))
    _product[grid](x.contiguous(), data, data.view(torch.float16), out, x.shape[0], matrix.n, matrix.k, **settings)
    return out


def _settings(matrix: Matrix) -> tuple[torch.Tensor, dict[str, Any]]:
    """The bytes, beginning at an even address, and what the kernels are compiled for."""
    fmt = QUANTIZED[matrix.format]
    data = matrix.data if matrix.data.storage_offset() % 2 == 0 else matrix.data.clone()
    return data, {"GROUP": fmt.block_elements, "BLOCK_BYTES": fmt.block_bytes, "FOUR": matrix.format != "int8"}
