"""The predicted timeline of a plan: a max-plus recurrence over the schedule's task graph.

Resources take their tasks in graph order: a task begins when its server is free and all it depends on has ended. `walk` does so task by
task over `schedule.block_tasks`; `pipeline` is the same recurrence with the micro-batches of a unit taken together, for the search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmoffload_solver.schedule import STAGING_BUFFERS, Task
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
    slowed: tuple[float, float] = (1.0, 1.0)
    """Factors by which reading and computing are slowed, which `read_s` and `compute_s` include."""


@dataclass(frozen=True)
class StagedStep:
    """A step some of whose layers have their keys and values on the disk."""

    work: StepWork
    batches_s: Mapping[int, tuple[float, ...]]
    """By the index of such a layer's unit, computing of each micro-batch."""
    load_s: tuple[float, ...]
    """Of each of these, unit by unit; none in a prefill."""
    store_s: tuple[float, ...]
    """The same; none in the last step."""


def walk(tasks: Iterable[Task], seconds: Callable[[Task], float]) -> list[Timed]:
    """Begin and end of each task when its resource takes tasks in graph order."""
    free: dict[tuple[Resource, int], float] = {}
    ends: list[float] = []
    timeline = []
    for task in tasks:
        server = task.resource, task.stage
        begin = max([free.get(server, 0.0), *(ends[index] for index in task.depends_on)])
        end = begin + seconds(task)
        free[server] = end
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


def staged_pipeline(blocks: Sequence[Sequence[StagedStep]], streams: Sequence[bool], slots: int) -> list[float]:
    """As `pipeline`, with loads and stores between: end of each step of blocks one after another, in the order of `schedule.block_tasks`.

    Loads share the reader with weights, which are read `slots` - 1 streaming units ahead; a load is made one use ahead (see
    `schedule._Staging` for what it waits for).
    """
    reads = iter([s for block in blocks for step in block for streams_now, s in zip(streams, step.work.read_s, strict=True) if streams_now])
    ring = _Ring(slots)
    for _ in range(slots - 1):
        ring.read(next(reads))
    ends: list[float] = []
    compute_end = write_end = 0.0
    for block in blocks:
        users, use = sum(len(batch_s) for batch_s in block[0].batches_s.values()), 0
        loads = [0.0] * users + [seconds for step in block[1:] for seconds in step.load_s]
        next_load, ahead = users, min(users, STAGING_BUFFERS) - 1
        loaded = [0.0] * users
        ended: list[float] = []
        for number, step in enumerate(block):
            for unit, compute in enumerate(step.work.compute_s):
                ready = 0.0
                if streams[unit]:
                    if (seconds := next(reads, None)) is not None:
                        ring.read(seconds)
                    ready = ring.filled.popleft()
                for batch_s in step.batches_s.get(unit, ()):
                    while next_load <= min(use + ahead, len(loads) - 1):
                        before = ended[next_load - STAGING_BUFFERS] if next_load >= STAGING_BUFFERS else 0.0
                        ring.read_end = max(ring.read_end, before, ended[next_load - users]) + loads[next_load]
                        loaded.append(ring.read_end)
                        next_load += 1
                    free = ended[use - STAGING_BUFFERS] if not number and use >= STAGING_BUFFERS else 0.0
                    compute_end = max(compute_end, ready, loaded[use], free) + batch_s
                    if number + 1 < len(block):
                        write_end = max(write_end, compute_end) + step.store_s[use % users]
                    ended.append(write_end if number + 1 < len(block) else compute_end)
                    use += 1
                if unit not in step.batches_s:
                    compute_end = max(compute_end, ready) + compute
                if streams[unit]:
                    ring.free(compute_end)
            ends.append(compute_end)
    return ends


class _Ring:
    """Ring buffers and the reader that fills them in turn."""

    def __init__(self, slots: int) -> None:
        self.read_end = 0.0
        self.filled: deque[float] = deque()
        """When the buffers read and not yet used were full."""
        self._free = deque([0.0] * slots)

    def read(self, seconds: float) -> None:
        """Read into the next buffer."""
        self.read_end = max(self.read_end, self._free.popleft()) + seconds
        self.filled.append(self.read_end)

    def free(self, at: float) -> None:
        """The buffer used longest is free from now."""
        self._free.append(at)
