"""The accelerators that a plan is for."""

from __future__ import annotations

from collections.abc import Sequence

from lmoffload.executor.cuda import CudaAccelerator
from lmoffload.executor.emulated import EmulatedAccelerator
from lmoffload.executor.resources import Accelerator
from lmoffload_solver.plan import Plan


def accelerators_of(plan: Plan, compute: Sequence[Sequence[int]], staging: Sequence[int]) -> tuple[Accelerator, ...]:
    """The emulated ones that a plan names, their threads bound to cores, if any; else this machine's.

    Args:
        compute: cores of each.
        staging: of their copies.

    Raises:
        StatedError: this machine has none, or not so many.
    """
    emulated = plan.limits.emulated_device
    if emulated is None:
        return tuple(CudaAccelerator(plan.limits.device_memory_bytes, number) for number in range(len(compute)))
    return tuple(EmulatedAccelerator(emulated.memory_bytes, emulated.bytes_per_s, cores[:1], staging) for cores in compute)
