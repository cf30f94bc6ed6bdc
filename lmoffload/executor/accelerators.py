"""The accelerator that a plan is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmoffload.executor.cuda import CudaAccelerator
from lmoffload.executor.emulated import EmulatedAccelerator
from lmoffload.executor.resources import Accelerator
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import TaskClass


def accelerator_of(plan: Plan, cores: Mapping[TaskClass, Sequence[int]]) -> Accelerator:
    """The emulated one that a plan names, its threads bound to these cores, if any; else this machine's.

    Raises:
        StatedError: this machine has none.
    """
    emulated = plan.limits.emulated_device
    if emulated is None:
        return CudaAccelerator(plan.limits.device_memory_bytes)
    return EmulatedAccelerator(emulated.memory_bytes, emulated.bytes_per_s, cores)
