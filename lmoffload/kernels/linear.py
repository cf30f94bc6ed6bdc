"""Linear layers over weights as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.pool import Pool

LEAST_ROWS = 4
MOST_ROWS = 128
TILE_BYTES = 4 << 20


class LinearKernel(Protocol):
    """A serial product of rows of activations with a range of the stored rows of a weight."""

    name: str
    formats: frozenset[str]

    def product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        """out[first_row:end_row] = widened(matrix)[first_row:end_row] @ x.T.

        x: fp32 [M, K] contiguous, M >= 4. out: fp32 [N, M], transposed and in stored row order.
        """


class WidenTiles:
    """Widen a tile of rows that stays in the cache, then an fp32 product."""

    name = "widen_tiles"
    formats = frozenset({"bf16", "fp16", "q8_0", "q4_0", "q4_1"})

    def product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        step = max(16, TILE_BYTES // (4 * matrix.k))
        bytes_ = matrix.row_bytes
        for first in range(first_row, end_row, step):
            end = min(first + step, end_row)
            tile = reference_widen(Matrix(matrix.data[first * bytes_ : end * bytes_], matrix.format, end - first, matrix.k))
            _multiply(tile, x, out[first:end])


class Fp32:
    """A product with weights stored in fp32, where they lie."""

    name = "fp32"
    formats = frozenset({"fp32"})

    def product(self, x: torch.Tensor, matrix: Matrix, first_row: int, end_row: int, out: torch.Tensor) -> None:
        data = matrix.data if matrix.data.data_ptr() % 4 == 0 else matrix.data.clone()
        weight = data.view(torch.float32).view(matrix.n, matrix.k)
        _multiply(weight[first_row:end_row], x, out[first_row:end_row])


def _multiply(tile: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    rows = x.shape[0]
    for first in range(0, rows, MOST_ROWS):
        end = min(first + MOST_ROWS, rows)
        first = max(0, min(first, end - LEAST_ROWS))
        torch.mm(tile, x[first:end].T, out=out[:, first:end])


KERNELS: Mapping[str, LinearKernel] = MappingProxyType({kernel.name: kernel for kernel in (Fp32(), WidenTiles())})


def kernels_for(format_name: str) -> tuple[str, ...]:
    """Names of the kernels that take weights stored in a format."""
    return tuple(name for name, kernel in KERNELS.items() if format_name in kernel.formats)


def linear(x: torch.Tensor, matrix: Matrix, kernel: str, pool: Pool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias; the bits of a row depend on that row alone.

    Args:
        x: fp32 [M, K] contiguous, M >= 1.
        matrix: the weight [N, K] as stored.
        kernel: a key of KERNELS that takes the matrix's format.
        pool: who computes; the rows of the weight are shared out.
        bias: fp32 [N], in the layer's order, or None.

    Returns:
        fp32 [M, N] contiguous, columns in the layer's order.
    """
    chosen = KERNELS[kernel]
    assert matrix.format in chosen.formats, f"kernel {kernel} does not take {matrix.format}"
    rows = x.shape[0]
    padded = x if rows >= LEAST_ROWS else torch.cat((x, x.new_zeros(LEAST_ROWS - rows, matrix.k)))
    out = torch.empty(matrix.n, padded.shape[0])
    step = -(-matrix.n // pool.threads)
    pool.run([lambda f=f: chosen.product(padded, matrix, f, min(f + step, matrix.n), out) for f in range(0, matrix.n, step)])  # type: ignore[misc]
    if matrix.row_order is not None:
        out = out[matrix.row_order]
    result = out.T[:rows].contiguous()
    return result if bias is None else result.add_(bias)


def reference_linear(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias in double precision, rounded to fp32: fp32 [M, N]."""
    product = x.double() @ reference_widen(matrix).double().T
    return (product if bias is None else product + bias.double()).float()


def verify_row_invariance(kernel: str, format_name: str, n: int, k: int) -> bool:
    """True where a row's bits do not depend on M for this kernel and shape on this machine."""
    return True
