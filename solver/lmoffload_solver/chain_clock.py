"""The quickest way to the times of a schedule with queues: what repeats from unit to unit is computed once.

What a unit's tasks do depends on the unit, the one whose weights go up meanwhile, and on when resources, buffers and micro-batches are
free, and on nothing else of the past. Where the same units meet the same times, the same follows, later by a constant.
`chain_queues.Queues` with a `Clock` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from lmoffload_solver.chain_layout import step_by_step
from lmoffload_solver.chain_queues import Queues
from lmoffload_solver.chain_schedule import NOTHING, Clock, UnitWork
from lmoffload_solver.pipeline import ALONE, Pipeline
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import Resource

FINE = 1e-10
"""Times that differ by less than this share of a unit's work are the same."""

RESOURCES: tuple[Resource, ...] = get_args(Resource)


def step_ends(
    steps: Sequence[Sequence[UnitWork]],
    runtime: Runtime,
    depth: int,
    waking: Callable[[float], float] | None = None,
    pipeline: Pipeline = ALONE,
) -> Iterator[tuple[float, int]]:
    """When each step of a block ends, and how many (unit, micro-batch) pairs were laid out for it; a step is laid out when asked for."""
    if runtime.overlap == "queues" and pipeline.num_stages == 1:
        queues, before = RepeatingQueues(steps, depth, waking), 0
        for end in queues.steps():
            yield end, queues.num_laid_out - before
            before = queues.num_laid_out
        return
    for units, end in zip(steps, step_by_step(steps, runtime, depth, Clock(waking).emit, pipeline), strict=True):
        yield end, sum(len(unit.batches) for unit in units)


class RepeatingQueues(Queues):
    """`Queues` on a clock of its own, whose times are counted from the end of the latest computing."""

    def __init__(self, steps: Sequence[Sequence[UnitWork]], depth: int, waking: Callable[[float], float] | None = None) -> None:
        self.clock = Clock(waking)
        super().__init__(steps, depth, self.clock.emit)
        self.known: dict[object, list[float]] = {}
        self.followed: dict[tuple[int, int, int, int], tuple[list[float], float]] = {}
        """What came after times that came before, by identity: the same lists are met again and again, and all are kept."""
        self.kept: list[list[float]] = []
        self.num_laid_out = 0
        different = {id(unit): unit for _, unit in self.units}.values()
        longest = max(unit.upload + unit.dequantize + unit.batches[0].compute + unit.batches[0].after for unit in different)
        self.fine = 1 / (FINE * longest) if longest else 1.0

    def steps(self) -> Iterator[float]:
        """The end of each step's last compute task."""
        for ahead in range(min(self.depth, len(self.units))):
            self.weights(ahead, 0, 1)
        times, begin = self.times(0), 0.0
        for number, (place, unit) in enumerate(self.units):
            times, begin = self.next_times(number, unit, times, begin)
            if number + 1 == len(self.units) or self.units[number + 1][0].step > place.step:
                yield begin + times[0]

    def next_times(self, number: int, unit: UnitWork, times: list[float], begin: float) -> tuple[list[float], float]:
        """The times after a unit, and what they are counted from."""
        # Nothing begins before the two latest units and micro-batches were computed, so earlier times are all alike.
        least, base = min(times[:4]), times[3]
        key: tuple[int, ...] | None = None
        ahead = self.units[number + self.depth][1] if number + self.depth < len(self.units) else None
        same = (id(times), id(self.units[number - 1][1]), id(unit), id(ahead))
        if same in self.followed:
            found, shift = self.followed[same]
            return found, begin + shift
        if least != NOTHING:
            times = [(time if time > least else least) - base for time in times]
            begin += base
            key = (*same[1:], *[round(time * self.fine) for time in times])
            if key in self.known:
                self.followed[same] = self.known[key], base
                return self.known[key], begin
        self.resume(number, times)
        if not self.depth:
            self.weights(number, 0, 1)
        self.unit(number)
        self.num_laid_out += len(unit.batches)
        found = self.times(number + 1)
        self.kept.append(found)
        if key is not None:
            self.known[key] = found
            self.followed[same] = found, base
        return found, begin

    def times(self, number: int) -> list[float]:
        """All that the tasks from a unit on may wait for: the units computed before, micro-batches computed and stored, resources, weights
        on their way, hidden states and attention of each micro-batch."""
        computed = [self.computed[n] if n >= 0 else NOTHING for n in (number - 1, number - 2)]
        coming = slice(number, number + self.depth)
        free = [self.clock.free.get((resource, 0), 0.0) for resource in RESOURCES]
        batches = range(len(self.units[min(number, len(self.units) - 1)][1].batches))
        return [
            *computed,
            *self.done,
            *self.sent,
            *free,
            *self.uploaded[coming],
            *self.staged[coming],
            *(self.hidden.get(batch, NOTHING) for batch in batches),
            *(self.deferred[batch][2] for batch in batches if batch in self.deferred),
        ]

    def resume(self, number: int, times: list[float]) -> None:
        """Take up the schedule at a unit with these times."""
        values = iter(times)
        for place in (number - 1, number - 2):
            computed = next(values)
            if place >= 0:
                self.computed[place] = computed
        self.done = [next(values), next(values)]
        self.sent = [next(values), next(values), next(values)]
        self.clock.free = {(resource, 0): next(values) for resource in RESOURCES}
        coming = range(number, min(number + self.depth, len(self.units)))
        for ahead in coming:
            self.uploaded[ahead] = next(values)
        for ahead in coming:
            self.staged[ahead] = next(values)
        batches = range(len(self.units[number][1].batches))
        self.hidden.update({batch: next(values) for batch in batches})
        before = self.units[number - 1][1].batches if number else ()
        self.deferred = {batch: (number - 1, work, next(values)) for batch, work in enumerate(before) if work.attend}
