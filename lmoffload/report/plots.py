"""Plots of a plan, with matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmoffload.errors import StatedError
from lmoffload_solver.curves_of_plan import Roofline
from lmoffload_solver.plan import Plan


def draw_plan(
    plan: Plan, roof: Roofline, by_batch: Sequence[tuple[int, float]], by_memory: Sequence[tuple[float, float]], path: Path
) -> None:
    """Three panels: the roofline of the plan's tasks, throughput against the block's rows, and against memory.

    Raises:
        StatedError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StatedError("Drawing needs matplotlib; install it with `pip install 'lmoffload[plot]'`.") from error
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    figure.suptitle(f"{plan.model.name} on {plan.machine.name}: {plan.predicted.tokens_per_s:.2f} tokens/s predicted")
    _roofline(axes[0], roof)
    _line(axes[1], by_batch, "sequences in a block", "Throughput against batch")
    _line(axes[2], [(size / 2**30, rate) for size, rate in by_memory], f"{roof.tier} memory (GiB)", "Throughput against memory")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise StatedError(f"The plot cannot be written to {path}: {error}.") from error


def _roofline(axis: Any, roof: Roofline) -> None:
    ridge = roof.flops_per_s / roof.bytes_per_s
    places = [point.flops_per_byte for point in roof.points]
    ends = (min(0.5, *places) / 2, max(ridge * 4, *places) * 2)
    flat = roof.flops_per_s / 1e12
    axis.plot([ends[0], ridge, ends[1]], [ends[0] * roof.bytes_per_s / 1e12, flat, flat], color="black")
    for point in roof.points:
        axis.scatter([point.flops_per_byte], [point.flops_per_s / 1e12], label=point.name, zorder=3)
    label = f"FLOPs per byte of {roof.tier} memory"
    axis.set(xscale="log", yscale="log", xlabel=label, ylabel="TFLOP/s", title="Roofline of the plan's tasks")
    axis.legend()
    axis.grid(visible=True, which="both", alpha=0.3)


def _line(axis: Any, points: Sequence[tuple[float, float]], label: str, title: str) -> None:
    axis.plot([x for x, _ in points], [y for _, y in points], marker="o")
    axis.set(xlabel=label, ylabel="tokens/s", title=title)
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
