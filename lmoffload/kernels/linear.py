"""Linear layers over weights as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import torch

from lmoffload.kernels.elementwise import add_to_rows
from lmoffload.kernels.fused import FusedDot
from lmoffload.kernels.int8_dot import Int8Dot
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.pool import Job, Pool
from lmoffload.kernels.tiles import TileProduct, steady_shape
from lmoffload_solver.formats import FORMATS, QUANTIZED, stored_bytes

JOB_PRODUCTS = 1 << 18
"""Products worth a job of their own: with one row 5 to 20 microseconds of reading, where a thread that looks begins in one."""

JOBS_PER_THREAD = 4
"""Jobs for each thread in large products, so that a thread that lost its core for a while does not hold up the others."""


class LinearKernel(Protocol):
    """A serial product of rows of activations with a range of the stored rows of a weight; many may run at once."""

    name: str
    formats: frozenset[str]
    least_rows: int
    """Activation rows below which the bits would change: fewer are padded with zeros."""

    def prepare(self, matrix: Matrix) -> None:
        """Compile what matrices of this format need; called before the jobs."""

    def unit(self, n: int, k: int) -> int:
        """Weight rows that a job takes as a whole."""

    def activations(self, x: torch.Tensor, matrix: Matrix, pool: Pool) -> torch.Tensor:
        """What `jobs` takes for x, fp32 [M, K] contiguous, M >= least_rows: made once for all jobs; its first dimension is M."""

    def jobs(self, x: torch.Tensor, matrix: Matrix, ranges: Sequence[tuple[int, int]], out: torch.Tensor) -> list[Job]:
        """Jobs that make out[:, first:end] = x @ widened(matrix)[first:end].T for every range of weight rows, GIL released.

        x: what `activations` made. out: fp32 [M, N] contiguous, columns in stored row order.
        """


KERNELS: Mapping[str, LinearKernel] = MappingProxyType(
    {
        "fp32": TileProduct("fp32", frozenset({"fp32"})),
        "widen_tiles": TileProduct("widen_tiles", frozenset([*FORMATS, *QUANTIZED]) - {"fp32"}),
        "fused_dot": FusedDot(),
        "int8_dot": Int8Dot(),
    }
)


def kernels_for(format_name: str) -> tuple[str, ...]:
    """Names of the kernels that take weights stored in a format."""
    return tuple(name for name, kernel in KERNELS.items() if format_name in kernel.formats)


def linear(x: torch.Tensor, matrix: Matrix, kernel: str, pool: Pool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias; the bits of a row depend on that row alone.

    Where torch's BLAS does not keep that promise (`blas_is_steady`), `fused_dot` computes in place of the kernel named.

    Args:
        x: fp32 [M, K] contiguous, M >= 1.
        matrix: the weight [N, K] as stored.
        kernel: a key of KERNELS that takes the matrix's format.
        pool: who computes; the rows of the weight are shared out.
        bias: fp32 [N], in the layer's order, or None.

    Returns:
        fp32 [M, N] contiguous, columns in the layer's order.
    """
    assert x.dtype == torch.float32 and x.is_contiguous() and x.dim() == 2 and x.shape[1] == matrix.k, "x is not fp32 [M, K] contiguous"
    assert matrix.format in KERNELS[kernel].formats, f"kernel {kernel} does not take {matrix.format}"
    chosen = steady_kernel(kernel, matrix.n, matrix.k)
    chosen.prepare(matrix)
    rows = x.shape[0]
    ranges = row_ranges(matrix.n, chosen.unit(matrix.n, matrix.k), matrix.k * rows, pool.threads)
    padded = x
    if rows < chosen.least_rows:
        pool.settle()
        padded = torch.cat((x, x.new_zeros(chosen.least_rows - rows, matrix.k)))
    out = pool.empty(padded.shape[0], matrix.n)
    ready = chosen.activations(padded, matrix, pool)
    pool.run(chosen.jobs(ready, matrix, ranges, out))
    if padded is not x:
        out = out[:rows]
    if matrix.row_order is not None:
        pool.settle()
        out = out.index_select(1, matrix.row_order)
    return out if bias is None else add_to_rows(out, bias, pool)


@lru_cache(maxsize=1024)
def row_ranges(n: int, unit: int, work: int, threads: int) -> Sequence[tuple[int, int]]:
    """The weight rows of each job: whole units, one job where the work is too little to share. work: products for each weight row."""
    units = -(-n // unit)
    worth = n * work // JOB_PRODUCTS
    jobs = 1 if worth < 2 or threads == 1 else min(units, max(worth, threads), JOBS_PER_THREAD * threads)
    edges = [min(units * i // jobs * unit, n) for i in range(jobs + 1)]
    return tuple(pairwise(edges))


def steady_kernel(kernel: str, n: int, k: int) -> LinearKernel:
    """The kernel named, or `fused_dot` where BLAS would let a row's bits depend on its company."""
    chosen = KERNELS[kernel]
    steady = not isinstance(chosen, TileProduct) or steady_shape(n, k)
    return chosen if steady else KERNELS[FusedDot.name]


def reference_linear(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias in double precision, rounded to fp32: fp32 [M, N]."""
    product = x.double() @ reference_widen(matrix).double().T
    return (product if bias is None else product + bias.double()).float()


def verify_row_invariance(kernel: str, format_name: str, n: int, k: int) -> bool:
    """Whether a row's bits are independent of M and of its place for this kernel and shape on this machine; about 10 ms.

    The tiles' shapes are tried by `steady_kernel`; the rest on at most 64 rows of weights, since more would repeat the same calls.
    """
    chosen, n = steady_kernel(kernel, n, k).name, min(n, 64)
    generator = torch.Generator().manual_seed(0)
    size = stored_bytes((n, k), format_name)
    data = torch.randint(48, 64, (size,), generator=generator, dtype=torch.uint8)  # normal numbers in every format
    matrix, x = Matrix(data, format_name, n, k), torch.randn(130, k, generator=generator)
    with Pool(1) as pool:
        whole = linear(x, matrix, chosen, pool)
        return all(
            torch.equal(linear(x[start : start + rows], matrix, chosen, pool), whole[start : start + rows])
            for rows, start in ((1, 0), (1, 129), (2, 64), (3, 5), (5, 31), (17, 2), (64, 60), (129, 1))
        )
