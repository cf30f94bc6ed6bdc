"""The schedule of a plan with a device, laid out once for all interpreters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmoffload_solver.chain_queues import Stages
from lmoffload_solver.chain_schedule import Emit, UnitWork
from lmoffload_solver.chain_turns import Turns, serially
from lmoffload_solver.pipeline import ALONE, Pipeline
from lmoffload_solver.runtime import Runtime


def lay_out(
    steps: Sequence[Sequence[UnitWork]], runtime: Runtime, depth: int, emit: Emit, pipeline: Pipeline = ALONE
) -> list[float]:
    """Emit the tasks of the steps of a block; returns the handle of each step's last task."""
    return list(step_by_step(steps, runtime, depth, emit, pipeline))


def step_by_step(
    steps: Sequence[Sequence[UnitWork]], runtime: Runtime, depth: int, emit: Emit, pipeline: Pipeline = ALONE
) -> Iterator[float]:
    """The same, a step emitted whenever its handle is asked for."""
    if runtime.overlap == "queues":
        return Stages(steps, depth, emit, pipeline).steps()
    assert pipeline.num_stages == 1, "only queues go on from one accelerator to the next"
    return Turns(steps, emit).steps() if runtime.overlap == "barriers" else serially(steps, emit)
