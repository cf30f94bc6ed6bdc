"""What the libraries' default threads cost: a decode-sized product as torch runs it when left alone, against ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmoffload.profiler.apart import ask_child
from lmoffload.profiler.child import DEFAULT_MATRICES, DEFAULT_ROWS, K, N
from lmoffload.profiler.samples import repeat
from lmoffload.profiler.weights import WeightSlab

if TYPE_CHECKING:
    from lmoffload.kernels.pool import Pool


def default_threads_slowdown(pool: Pool, budget_s: float, timeout_s: float) -> float:
    """Seconds under default (busy-waiting) threads in a process of its own / ours with the fastest fp32 kernel, over as many weights.

    Raises:
        StatedError: the other process failed.
    """
    import torch

    from lmoffload.kernels.linear import kernels_for, linear

    default_s = float(ask_child("default_threads", timeout_s, default_threads=True)["seconds"])
    matrices = WeightSlab(DEFAULT_MATRICES * 4 * N * K).matrices("fp32", N, K)
    x = torch.randn(DEFAULT_ROWS, K, generator=torch.Generator().manual_seed(0))
    kernels = kernels_for("fp32")

    def median_s(kernel: str) -> float:
        return repeat(lambda: linear(x, next(matrices), kernel, pool), budget_s / len(kernels)).median_s

    return default_s / min(median_s(kernel) for kernel in kernels)
