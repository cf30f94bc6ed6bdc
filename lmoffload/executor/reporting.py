"""What an engine has run, beside what its plan predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmoffload.executor import process
from lmoffload.executor.device_side import DeviceSide
from lmoffload.executor.meter import Meter
from lmoffload.executor.performed import performed
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.stored_weights import StoredWeights
from lmoffload.executor.tiered_weights import TieredWeights
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.report import RunReport, TaskFigures, phase_figures, relative_errors
from lmoffload_solver.schedule import Unit
from lmoffload_solver.value import Kind, Tier


def run_report(
    plan: Plan,
    shape: ModelShape,
    units: tuple[Unit, ...],
    meter: Meter,
    stores: Sequence[StoredWeights],
    device: DeviceSide | None,
    *,
    base_bytes: int,
    bytes_read: int,
    remarks: Sequence[str],
    reader: DiskReader,
) -> RunReport:
    """The report of a run so far.

    Args:
        base_bytes: of the process before weights were loaded.
        bytes_read: from disk, as the kernel counts them.
    """
    peak = process.peak_resident_bytes()
    measured = meter.figures(_peak_bytes(device, peak, meter.spilled_bytes + plan.weights.bytes.get("disk", 0)), base_bytes)
    work = performed(meter, shape, plan, units)
    return RunReport(
        plan=plan,
        predicted=plan.predicted,
        measured=measured,
        error=relative_errors(plan.predicted, measured),
        machine=plan.machine,
        emulated=device is not None and device.emulated,
        resident_bytes=_resident_bytes(stores),
        bytes_read=bytes_read,
        prompts_computed=meter.prompts,
        tasks={kind: _task_figures(plan, meter, kind) for kind in meter.counts},
        phases=phase_figures(work, None),
        performed=work,
        waste=meter.waste,
        threads={} if device is None else device.threads(plan, reader),
        overlapped_s=None if device is None else meter.overlapped_s,
        control_s=None if device is None else meter.control_s,
        peak_rss_bytes=peak,
        remarks=tuple(remarks),
        versions={"torch": torch.__version__},
    )


def _task_figures(plan: Plan, meter: Meter, kind: Kind) -> TaskFigures:
    """The plan's busy seconds of a resource are the prediction for the kind of tasks that is alone on it."""
    resource = meter.resource_of(kind)
    predicted = None if resource is None else plan.predicted.resources.get(resource)
    return TaskFigures(count=meter.counts[kind], predicted_s=predicted, measured_s=meter.seconds[kind])


def _resident_bytes(stores: Sequence[StoredWeights]) -> dict[Tier, int]:
    found: dict[Tier, int] = {}
    for weights in stores:
        if isinstance(weights, TieredWeights):
            found["device"] = found.get("device", 0) + weights.home_bytes["device"] + weights.device_vector_bytes
            found["host"] = found.get("host", 0) + weights.home_bytes["host"]
        else:
            found["host"] = weights.resident_bytes + weights.vector_bytes
    return found


def _peak_bytes(device: DeviceSide | None, resident: int, on_disk: int) -> dict[Tier, int]:
    """By tier, of the fullest accelerator; of the disk, homes. An emulated device's memory is the process's own, and counted apart."""
    if device is None:
        return {"host": resident}
    taken = device.peak_bytes
    host = max(0, resident - sum(taken)) if device.emulated else resident
    return {"device": max(taken), "host": host, "disk": on_disk}
