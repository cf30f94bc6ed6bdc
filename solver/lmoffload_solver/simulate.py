"""The predicted timeline of a plan: a max-plus recurrence over the schedule's task graph.

Resources take their tasks in graph order: a task begins when its server is free and all it depends on has ended. `walk` does so task by
task over `schedule.block_tasks`; `pipeline` is the same recurrence with the micro-batches of a unit taken together, for the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lmoffload_solver.schedule import Task
from lmoffload_solver.value import Resource


@dataclass(frozen=True, slots=True)
class Timed:
    """A task with its predicted begin and end, seconds from the start."""

    task: Task
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class StepWork:
    """Seconds of one step by unit: reading what it streams, and computing it for all micro-batches."""

    read_s: tuple[float, ...]
    """0 for a unit that streams nothing."""
    compute_s: tuple[float, ...]


def walk(tasks: Iterable[Task], seconds: Callable[[Task], float]) -> list[Timed]:
    """Begin and end of each task when its resource takes tasks in graph order."""
    free: dict[Resource, float] = {}
    ends: list[float] = []
    timeline = []
    for task in tasks:
        begin = max([free.get(task.resource, 0.0), *(ends[index] for index in task.depends_on)])
        end = begin + seconds(task)
        free[task.resource] = end
        ends.append(end)
        timeline.append(Timed(task, begin, end))
    return timeline


def step_ends(timeline: Sequence[Timed]) -> list[float]:
    """When the last compute task of each step ends."""
    ends: dict[int, float] = {}
    for timed in timeline:
        if timed.task.kind == "compute":
            ends[timed.task.step] = timed.end_s
    return [ends[step] for step in sorted(ends)]


def busy_seconds(timeline: Sequence[Timed]) -> dict[Resource, float]:
    """Seconds that each resource works."""
    busy: dict[Resource, float] = {}
    for timed in timeline:
        resource = timed.task.resource
        busy[resource] = busy.get(resource, 0.0) + timed.end_s - timed.begin_s
    return busy


def pipeline(steps: Sequence[StepWork], streams: Sequence[bool], slots: int) -> list[float]:
    """End of each step when `slots` ring buffers serve the units that stream.

    read u begins when the reader is free and the unit that used the buffer before (`slots` streaming units earlier) is computed;
    unit u is computed when it is read and the unit before it is computed.
    """
    ends: list[float] = []
    buffers = [0.0] * slots
    slot = 0
    read_end = compute_end = 0.0
    for step in steps:
        for streaming, read, compute in zip(streams, step.read_s, step.compute_s, strict=True):
            if streaming:
                read_end = max(read_end, buffers[slot]) + read
                compute_end = max(compute_end, read_end) + compute
                buffers[slot] = compute_end
                slot = slot + 1 if slot + 1 < slots else 0
            else:
                compute_end += compute
        ends.append(compute_end)
    return ends
