"""The accelerator that a plan is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmoffload.executor.emulated import EmulatedAccelerator
from lmoffload.executor.resources import Accelerator
from lmoffload_solver.errors import StatedError
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import TaskClass


def accelerator_of(plan: Plan, cores: Mapping[TaskClass, Sequence[int]]) -> Accelerator:
    """The emulated one that a plan names, its threads bound to these cores, if any.

    Raises:
        StatedError: it names none.
    """
    emulated = plan.limits.emulated_device
    if emulated is None:
        raise StatedError("This plan is for a real device, which cannot be run yet: plan with --emulate-device.")
    return EmulatedAccelerator(emulated.memory_bytes, emulated.bytes_per_s, cores)
