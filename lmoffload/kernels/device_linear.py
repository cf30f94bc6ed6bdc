"""Linear layers of a torch device over weights as they are stored: torch's own product in the dtype of the activations.

PyTorch's `_weight_int8pack_mm` and `_weight_int4pack_mm` are not used: the former scales whole rows where our groups have a scale each, the
latter rounds scales and minima to bf16 and wants a layout of its own, which for weights that stream would be made anew at every use.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.quantize import dequantize
from lmoffload.kernels.tiled import is_tiled, unpack
from lmoffload.kernels.triton_ready import triton_runs_on
from lmoffload_solver.errors import StatedError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DEQUANTIZING = "dequantizing"
"""Name of the product that dequantizes in its inner loop; quantized weights of any other are widened first."""

DEVICE_KERNELS = ("16bit", "widen", DEQUANTIZING)

FUSED_ROWS = 64
"""Rows up to which a product may dequantize in its inner loop: with more, every weight would be dequantized again for each 16 of them."""


def device_linear(x: torch.Tensor, matrix: Matrix, kernel: str = "widen", bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias.

    Args:
        x: [M, K] in any floating dtype, on the matrix's device.
        matrix: the weight [N, K]; plain formats, and the quantized ones of `tiled`.
        kernel: one of DEVICE_KERNELS.
        bias: [N] in the layer's order, or None.

    Returns:
        [M, N] of x's dtype, columns in the layer's order.

    Raises:
        StatedError: no kernel of the device takes the format.
    """
    if is_tiled(matrix.format) and kernel == DEQUANTIZING and x.shape[0] <= FUSED_ROWS and triton_runs_on(x.device):
        from lmoffload.kernels.triton_tiles import tile_product

        out = tile_product(x, matrix)
        return _ordered(out, matrix) if bias is None else _ordered(out, matrix).add_(bias)
    weight = device_widen(matrix, x.dtype)
    if matrix.row_order is None:
        return functional.linear(x, weight, bias)
    out = _ordered(functional.linear(x, weight), matrix)
    return out if bias is None else out.add_(bias)


def device_widen(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [N, K] in a floating dtype, in stored row order; of plain formats in that dtype a view.

    Raises:
        StatedError: no kernel of the device takes the format.
    """
    if matrix.format in DTYPES:
        return _aligned(matrix.data, DTYPES[matrix.format].itemsize).view(DTYPES[matrix.format]).view(matrix.n, matrix.k).to(dtype)
    if not is_tiled(matrix.format):
        raise StatedError(f"A device takes no weights stored as {matrix.format}: plan for the host, or use the model's safetensors.")
    if triton_runs_on(matrix.data.device):
        from lmoffload.kernels.triton_tiles import widen_tiles

        return widen_tiles(matrix, dtype)
    return dequantize(unpack(matrix.data, matrix.format, matrix.n, matrix.k)).to(dtype)


def _aligned(data: torch.Tensor, size: int) -> torch.Tensor:
    return data if data.storage_offset() % size == 0 else data.clone()


def _ordered(out: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return out if matrix.row_order is None else out.index_select(1, matrix.row_order.to(out.device))
