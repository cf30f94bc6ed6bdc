"""Linear layers: FLOP/s of every kernel and stored format against the rows M and the threads, weights rotated beyond the caches."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lmoffload.profiler.curves import curve_of
from lmoffload.profiler.limits import usable_memory
from lmoffload.profiler.memory import rotation_bytes
from lmoffload.profiler.overheads import product_s, run_s
from lmoffload.profiler.samples import Sample, repeat, timed
from lmoffload.profiler.weights import WeightSlab
from lmoffload_solver.formats import format_of
from lmoffload_solver.machine import LinearCurve

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.pool import Pool

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
QUICK_ROWS = (1, 16, 64, 256, 1024)
"""One row is computed as four."""
QUICK_FEW_THREADS_ROWS = (1, 64)
"""With fewer threads than there are, which few plans choose."""
LEAST_POINTS = 2
SHAPES = ((5632, 2048), (1536, 576), (192, 576))
"""[N, K]: of the feed-forward layers of a 1.1B model and of a 135M one, and of this one's keys."""
LARGE = 1 << 22
LONG_S = 0.015
"""A product that takes longer is run twice, without a warm-up."""
IN_TURN = 4
"""Inputs and outputs that are taken in turn: those of a layer's products do not meet the caches as one product's alone do."""
MEMORY_SHARE = 6
"""Inputs and outputs take at most one part in this many of the usable memory."""


class Case(NamedTuple):
    """One curve to measure."""

    kernel: str
    format: str
    pool: Pool
    n: int
    k: int


def linear_curves(
    pools: Sequence[Pool],
    budget_s: float,
    *,
    quick: bool,
    formats: Sequence[str],
    tell: Callable[[str], None] = lambda what: None,
) -> tuple[tuple[LinearCurve, ...], tuple[str, ...]]:
    """Curves of every kernel for the given stored formats, and remarks.

    With few numbers, as of one token, the runs alone are timed, since the engine has them done without Python. Else the hand-over to a pool
    that is awake, as it is here, is taken out of the times. Costs add `Overheads.linear_call_s` for every layer.
    """
    num_bytes, beyond = rotation_bytes()
    slab = WeightSlab(num_bytes)
    call_s = {pool.threads: product_s(pool, 16, 16, budget_s * 0.01, 0.0, timed) for pool in pools}
    cases = list(_cases(pools, formats))
    end = time.perf_counter() + budget_s
    found, cut = [], 0
    compile_kernels(formats)
    for index, case in enumerate(cases):
        tell(f"linear layers, {case.kernel} on {case.format}, {case.pool.threads} threads, {case.n} x {case.k}")
        rows = ROWS if not quick else QUICK_ROWS if case.pool is pools[-1] else QUICK_FEW_THREADS_ROWS
        matrices = slab.matrices(case.format, case.n, case.k)
        # Large shapes take ten times the work of small ones and are what runs spend their time on.
        share_s = (end - time.perf_counter()) * _weight(case) / sum(_weight(left) for left in cases[index:])
        curve = _curve(case, matrices, rows, max(0.0, share_s), beyond, call_s[case.pool.threads])
        cut += curve.flops_per_s.x[-1] < rows[-1]
        found.append(curve)
    remarks = []
    if not beyond:
        remarks.append(
            f"Linear layers were measured over {num_bytes / 1e6:.0f} MB of weights, which may not exceed the last-level cache: "
            "their rates at few rows may be too high."
        )
    if cut:
        remarks.append(
            f"{cut} of {len(found)} curves of linear layers end early, for want of time or memory; rates are taken to be flat beyond."
        )
    return tuple(found), tuple(remarks)


def _cases(pools: Sequence[Pool], formats: Sequence[str]) -> Iterator[Case]:
    from lmoffload.kernels.linear import kernels_for

    for format_name in formats:
        for kernel in kernels_for(format_name):
            for pool in pools:
                for n, k in SHAPES:
                    if k % format_of(format_name).block_elements == 0:
                        yield Case(kernel, format_name, pool, n, k)


def compile_kernels(formats: Sequence[str]) -> None:
    """Compile what the formats' kernels need, so that it does not take the time of the first curve of a format."""
    import torch

    from lmoffload.kernels.linear import KERNELS, kernels_for
    from lmoffload.kernels.matrix import Matrix

    for format_name in formats:
        for kernel in kernels_for(format_name):
            KERNELS[kernel].prepare(Matrix(torch.empty(0, dtype=torch.uint8), format_name, 0, 0))


def _weight(case: Case) -> float:
    """Shares of the time: fewer threads and larger layers take longer."""
    return (1.0 if case.n * case.k > LARGE else 0.4) / math.sqrt(case.pool.threads)


def _curve(
    case: Case, matrices: Iterator[Matrix], rows: Sequence[int], budget_s: float, beyond: bool, call_s: float
) -> LinearCurve:
    """Rates at ascending M, for as long as another point is expected to fit the budget; two at least."""
    import torch

    most_rows = usable_memory() // MEMORY_SHARE // (4 * IN_TURN * (case.k + case.n))
    end = time.perf_counter() + budget_s
    samples: list[Sample] = []
    for index, m in enumerate(rows):
        left_s = end - time.perf_counter()
        # A product takes at most as much longer as it has more rows.
        expected_s = samples[-1].median_s * m / rows[index - 1] if samples else 0.0
        is_long = expected_s > LONG_S
        if index >= LEAST_POINTS and (expected_s * (2 if is_long else 4) > left_s * 1.5 or m > most_rows):
            break
        inputs = list(torch.randn(IN_TURN, m, case.k, generator=torch.Generator().manual_seed(m)))
        samples.append(_sample(case, matrices, inputs, max(0.0, left_s) / (2 * (len(rows) - index)), call_s, is_long))
    return LinearCurve(
        kernel=case.kernel,
        format=case.format,
        threads=case.pool.threads,
        n=case.n,
        k=case.k,
        flops_per_s=curve_of(rows[: len(samples)], [2.0 * m * case.n * case.k for m in rows[: len(samples)]], samples),
        beyond_cache=beyond,
    )


def _sample(
    case: Case, matrices: Iterator[Matrix], inputs: Sequence[torch.Tensor], budget_s: float, call_s: float, is_long: bool
) -> Sample:
    from lmoffload.kernels.linear import linear
    from lmoffload.kernels.runs import Rooms
    from lmoffload_solver.counting import FEW_NUMBERS

    in_turn = itertools.cycle(inputs)
    outputs: deque[torch.Tensor] = deque(maxlen=IN_TURN - 1)

    def product() -> None:
        outputs.append(linear(next(in_turn), next(matrices), case.kernel, case.pool))

    few = inputs[0].numel() <= FEW_NUMBERS
    clock = partial(run_s, case.pool, Rooms()) if few else timed
    sample = repeat(product, budget_s, warmups=0 if is_long else 1, at_least=2 if is_long else 3, clock=clock)
    return sample if few else Sample(max(sample.median_s - call_s, sample.median_s / 2), sample.spread, sample.count)
