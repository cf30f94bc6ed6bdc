"""Timelines as Chrome trace JSON (https://perfetto.dev opens it): what was predicted and what was measured, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lmoffload_solver.schedule import Task, Unit
from lmoffload_solver.value import Resource

PROCESSES = ("predicted", "measured")
RESOURCES: tuple[Resource, ...] = ("disk_read", "disk_write", "upload", "download", "device", "host_compute", "host_attention")
MICROSECONDS = 1e6


class TimedTask(Protocol):
    """A task with its begin and end, seconds from any start."""

    @property
    def task(self) -> Task: ...
    @property
    def begin_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


def trace_document(units: Sequence[Unit], predicted: Iterable[TimedTask], measured: Sequence[TimedTask]) -> dict[str, Any]:
    """The tasks that were run, as events named alike in the processes "predicted" and "measured", a thread for each resource.

    Args:
        predicted: tasks that were not run are left out, so that both halves hold the same.
    """
    run = {_identity(timed.task) for timed in measured}
    halves = ([timed for timed in predicted if _identity(timed.task) in run], measured)
    events: list[Mapping[str, Any]] = []
    for process, (name, timeline) in enumerate(zip(PROCESSES, halves, strict=True), 1):
        events += _names(process, name, timeline)
        start_s = min((timed.begin_s for timed in timeline), default=0.0)
        events += [_event(process, units[timed.task.unit], timed, start_s) for timed in timeline]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _identity(task: Task) -> tuple[str, int, int, int | None]:
    return task.kind, task.step, task.unit, task.micro_batch


def _names(process: int, name: str, timeline: Sequence[TimedTask]) -> Iterator[Mapping[str, Any]]:
    """Metadata: names of the process and of its threads."""
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    servers = {_thread(timed.task): timed.task for timed in timeline}
    for number, task in sorted(servers.items()):
        label = f"{task.resource} of accelerator {task.stage + 1}" if task.stage else task.resource
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": label}}


def _thread(task: Task) -> int:
    return task.stage * len(RESOURCES) + RESOURCES.index(task.resource) + 1


def _event(process: int, unit: Unit, timed: TimedTask, start_s: float) -> Mapping[str, Any]:
    """A complete event."""
    task = timed.task
    arguments: dict[str, Any] = {"step": task.step}
    if task.num_bytes:
        arguments["bytes"] = task.num_bytes
    return {
        "name": _label(unit) + ("" if task.micro_batch is None else f" · batch {task.micro_batch}"),
        "cat": task.kind,
        "ph": "X",
        "ts": (timed.begin_s - start_s) * MICROSECONDS,
        "dur": max(0.0, timed.end_s - timed.begin_s) * MICROSECONDS,
        "pid": process,
        "tid": _thread(task),
        "args": arguments,
    }


def _label(unit: Unit) -> str:
    """What a unit is, in words."""
    if unit.kind == "embed":
        return "embedding"
    if unit.kind == "head":
        return f"head, rows {unit.first_row} to {unit.end_row - 1}"
    if unit.kind == "part":
        return f"layer {unit.layer}, from {unit.computes[0].removesuffix('.weight').rpartition('.')[2]}"
    return f"layer {unit.layer}"
