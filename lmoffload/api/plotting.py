"""Drawing a plan."""

from __future__ import annotations

from pathlib import Path

from lmoffload.api.planning import ModelPlan
from lmoffload.report.plots import draw_plan
from lmoffload_solver.curves_of_plan import by_batch, by_memory, roofline


def plot_plan(planned: ModelPlan, path: Path) -> None:
    """Draw a plan's roofline, and throughput against batch and memory.

    Raises:
        StatedError: matplotlib is not installed, or the file cannot be written.
    """
    plan, shape, machine = planned.plan, planned.model.shape, planned.machine
    draw_plan(plan, roofline(shape, machine, plan), by_batch(shape, machine, plan), by_memory(shape, machine, plan), path)
