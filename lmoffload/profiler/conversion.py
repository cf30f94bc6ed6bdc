"""Weights turned into a stored format, as preparing a store does, and back to fp32: elements per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmoffload.profiler.memory import rotation_bytes
from lmoffload.profiler.samples import repeat
from lmoffload.profiler.weights import WeightSlab, random_blocks
from lmoffload_solver.accelerator import Rate
from lmoffload_solver.formats import format_of, stored_bytes

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.pool import Pool

ROWS, COLUMNS = 512, 2048
"""A piece as large as those in which a store is written."""
SOURCE_FORMAT = "bf16"
"""What most checkpoints are stored in."""


def conversion_rates(
    pool: Pool, formats: Sequence[str], budget_s: float, tell: Callable[[str], None] = lambda what: None
) -> tuple[Rate, ...]:
    """For each format, the rate of quantizing (torch's operators, one thread, the bf16 source widened first) and of dequantizing (compiled,
    all threads of the pool, each over its own rows, weights rotated beyond the last-level cache)."""
    import torch

    from lmoffload.kernels.matrix import Matrix

    elements, found, slab = float(ROWS * COLUMNS), [], WeightSlab(rotation_bytes()[0])
    source = Matrix(random_blocks(SOURCE_FORMAT).repeat(8)[: 2 * ROWS * COLUMNS], SOURCE_FORMAT, ROWS, COLUMNS)
    wide = torch.empty(ROWS, COLUMNS)
    for format_name in formats:
        tell(f"quantizing to {format_name}")
        each_s = budget_s / (2 * len(formats))
        quantizing = repeat(partial(_quantize, source, format_name), each_s)
        dequantizing = repeat(partial(_widen_next, slab.matrices(format_name, ROWS, COLUMNS), wide, pool), each_s)
        found.append(Rate(work="quantize", tier="host", way="eager", format=format_name, per_s=elements / quantizing.median_s))
        found.append(Rate(work="dequantize", tier="host", way="fused", format=format_name, per_s=elements / dequantizing.median_s))
    return tuple(found)


def _quantize(source: Matrix, format_name: str) -> None:
    from lmoffload.kernels.matrix import reference_widen
    from lmoffload.kernels.quantize import quantize

    quantize(reference_widen(source), format_name)


def _widen_next(matrices: Iterator[Matrix], out: torch.Tensor, pool: Pool) -> None:
    from lmoffload.kernels.product import format_kernels

    matrix = next(matrices)
    tile = format_of(matrix.format).tile_rows
    widen, rows = format_kernels(matrix.format).widen, -(-ROWS // (pool.threads * tile)) * tile
    jobs = []
    for first in range(0, ROWS, rows):
        count = min(rows, ROWS - first)
        at = matrix.data.data_ptr() + stored_bytes((first, matrix.k), matrix.format)
        jobs.append(partial(widen, at, matrix.row_bytes, count, out[first:].data_ptr(), 4 * matrix.k, matrix.k))
    pool.run(jobs)
