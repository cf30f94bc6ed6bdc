"""The accelerator that a plan is for."""

from __future__ import annotations

from lmoffload.executor.emulated import EmulatedAccelerator
from lmoffload.executor.resources import Accelerator
from lmoffload_solver.errors import StatedError
from lmoffload_solver.plan import Plan


def accelerator_of(plan: Plan) -> Accelerator:
    """The emulated one that a plan names.

    Raises:
        StatedError: it names none.
    """
    emulated = plan.limits.emulated_device
    if emulated is None:
        raise StatedError("This plan is for a real device, which cannot be run yet: plan with --emulate-device.")
    return EmulatedAccelerator(emulated.memory_bytes, emulated.bytes_per_s)
