"""The schedule of a plan with a device where every resource has its own queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from lmoffload_solver.chain_schedule import NOTHING, BatchWork, Emit, UnitWork, num_buffers
from lmoffload_solver.pipeline import ALONE, Pipeline, Place
from lmoffload_solver.value import Kind


@dataclass(frozen=True)
class Passed:
    """What stages of a pipeline tell each other, by micro-batch."""

    hidden: dict[int, float] = field(default_factory=dict)
    """Latest store of its hidden states."""
    chosen: dict[int, float] = field(default_factory=dict)
    """The end of its latest step, where another stage begins the next one."""


class Queues:
    """One stage of a pipeline, in which every resource has its own queue.

    A unit's weights go up in one piece per micro-batch, between the loads of the unit that is computed `depth` units before, into one of
    depth + 1 buffers, free once all micro-batches have computed the unit that had it. Keys and values that are away, and hidden states,
    have two buffers, taken in turn by the uses (unit, micro-batch): a use is loaded while the one before computes, and computes when what
    the use two before left in its buffer has been stored.

    Where the host attends, the device goes on with the next micro-batch, and takes up the rest of the layer together with the
    beginning of the next: while the host attends to one micro-batch the device computes the others. A layer's weights are then needed one
    unit longer, so there is one buffer more. Hidden states that wait for the host's attention are stored and loaded around it.

    A stage does its units for one wave after the other. Of its last unit it stores the hidden states that the next stage loads; the first
    stage begins a step of a micro-batch when the last one has chosen the tokens of the step before.
    """

    def __init__(
        self,
        steps: Sequence[Sequence[UnitWork]],
        depth: int,
        emit: Emit,
        pipeline: Pipeline = ALONE,
        stage: int = 0,
        passed: Passed | None = None,
    ) -> None:
        units, waves = pipeline.units_of(stage, len(steps[0])), pipeline.waves_of(len(steps[0][0].batches))
        known: dict[tuple[int, range], UnitWork] = {}
        self.units = [
            (Place(step, place, wave[0], number, stage), _cut(works[place], wave, known))
            for step, works in enumerate(steps)
            for number, wave in enumerate(waves)
            for place in units
        ]
        """Each with the place of its first micro-batch."""
        self.per_pass, self.is_first, self.is_last = len(units), stage == 0, stage == pipeline.num_stages - 1
        self.has_one_use = self.per_pass == len(steps[0][0].batches) == 1
        """A step's only keys and values were stored by the use just before."""
        self.depth, self.emit = depth, emit
        different = {id(unit): unit for _, unit in self.units}.values()
        self.buffers = num_buffers(depth, any(batch.attend for unit in different for batch in unit.batches))
        self.deferred: dict[int, tuple[int, BatchWork, float]] = {}
        """By micro-batch: the unit whose attention the host is at, and when that ends."""
        self.uploaded = [NOTHING] * len(self.units)
        self.staged = [NOTHING] * len(self.units)
        self.computed = [NOTHING] * len(self.units)
        """When the last micro-batch of a unit is computed, by unit."""
        self.done = [NOTHING, NOTHING]
        """The two latest uses computed."""
        self.sent = [NOTHING, NOTHING, NOTHING]
        """What the three latest uses stored."""
        passed = passed or Passed()
        self.hidden, self.chosen = passed.hidden, passed.chosen

    def passes(self) -> Iterator[Iterator[float]]:
        """For every pass of a wave, step after step, what emits its units one by one; each gives the handle of its last compute task."""
        for first in range(0, len(self.units), self.per_pass):
            yield self.one_pass(first)

    def one_pass(self, first: int) -> Iterator[float]:
        """Emit units from one on, one by one."""
        if not first:
            for ahead in range(min(self.depth, len(self.units))):
                self.weights(ahead, 0, 1)
        for number in range(first, first + self.per_pass):
            if not self.depth:
                self.weights(number, 0, 1)
            self.unit(number)
            if number + 1 == first + self.per_pass:
                self.hand_on(number)
            yield self.computed[number]

    def weights(self, number: int, piece: int, pieces: int) -> None:
        """Emit one piece of a unit's weights."""
        if number >= len(self.units):
            return
        place, unit = self.units[number]
        before, share, where = number - self.buffers, (piece, pieces), place.of(None)
        free = self.computed[before] if before >= 0 else NOTHING
        if unit.read:
            self.staged[number] = self.emit("disk_read", "read_weights", where, unit.read / pieces, (free,), share)
        if unit.upload:
            waits = (free, self.staged[number])
            self.uploaded[number] = self.emit("upload", "upload_weights", where, unit.upload / pieces, waits, share)

    def unit(self, number: int) -> None:
        """Emit one unit of a pass."""
        place, unit = self.units[number]
        emit, batches, ready, first = self.emit, unit.batches, self.uploaded[number], place.batch
        assert first is not None
        begins, ends = number % self.per_pass == 0, number % self.per_pass == self.per_pass - 1
        if unit.dequantize:
            ready = emit("device", "dequantize_weights", place.of(None), unit.dequantize, (ready,))
        latest = (self.sent[2],) if self.has_one_use else ()
        loaded = self.load(number, first, batches[0], (self.done[0], self.sent[1], self.sent[0], *latest))
        for batch, work in enumerate(batches, first):
            turn, where = batch - first, place.of(batch)
            upcoming: tuple[float, ...] = ()
            if turn + 1 < len(batches):
                upcoming = self.load(number, batch + 1, batches[turn + 1], (self.done[1], self.sent[2], self.sent[1]))
            if self.depth:
                self.weights(number + self.depth, turn, len(batches))
            self.take_up(batch)
            kind: Kind = "compute_before_attention" if work.attend else "compute"
            before = (self.chosen[batch],) if begins and batch in self.chosen else ()
            end = emit("device", kind, where, work.compute, (ready, *loaded, self.sent[1], *before))
            if work.quantize:
                end = emit("device", "quantize_kv", where, work.quantize, ())
            self.done = [self.done[1], end]
            self.computed[number] = end
            if ends and self.is_last and not self.is_first:
                self.chosen[batch] = end
            self.sent = [*self.sent[1:], self.attend(number, batch, work, end) if work.attend else self.store(number, batch, work, end)]
            loaded = upcoming

    def attend(self, number: int, batch: int, work: BatchWork, end: float) -> float:
        """Emit the host's attention, and what is stored beside it; returns the last store."""
        where, last = self.units[number][0].of(batch), NOTHING
        attended = self.emit("host_attention", "host_attention", where, work.attend, (end,))
        self.deferred[batch] = (number, work, attended)
        if work.store_hidden:
            last = self.hidden[batch] = self.emit("download", "store_hidden", where, work.store_hidden, (end,))
        if work.write:
            last = self.emit("disk_write", "store_kv", where, work.write, (attended, last))
        return last

    def take_up(self, batch: int) -> None:
        """Emit the rest of the layer for a micro-batch that the host attended to."""
        if batch not in self.deferred:
            return
        number, work, attended = self.deferred.pop(batch)
        where = self.units[number][0].of(batch)
        waits: tuple[float, ...] = (attended,)
        if work.load_hidden:
            loaded = self.emit("upload", "load_hidden", where, work.load_hidden, (self.hidden.get(batch, NOTHING), self.done[0]))
            waits = (attended, loaded)
        self.computed[number] = self.emit("device", "compute_after_attention", where, work.after, waits)

    def hand_on(self, number: int) -> None:
        """Emit what is left of a wave at the last unit of a stage that is not the last."""
        if self.is_last:
            return
        for batch in list(self.deferred):
            work = self.deferred[batch][1]
            self.take_up(batch)
            where, end = self.units[number][0].of(batch), self.computed[number]
            self.hidden[batch] = self.emit("download", "store_hidden", where, work.store_hidden, (end,))

    def load(self, number: int, batch: int, work: BatchWork, free: tuple[float, ...]) -> tuple[float, ...]:
        """Emit what a micro-batch needs from outside the device, once its buffers are free: the use two before computed and stored, and
        the one three before stored, which is the same keys' and values' where a step has three uses. Returns what computing waits for."""
        where, waits = self.units[number][0].of(batch), []
        if work.read:
            waits.append(self.emit("disk_read", "load_kv", where, work.read, free))
        if work.load_kv:
            waits.append(self.emit("upload", "load_kv", where, work.load_kv, (*free, *waits)))
        if work.load_hidden and batch not in self.deferred:
            waits.append(self.emit("upload", "load_hidden", where, work.load_hidden, (*free, self.hidden.get(batch, NOTHING))))
        return tuple(waits)

    def store(self, number: int, batch: int, work: BatchWork, end: float) -> float:
        """Emit what a micro-batch leaves outside the device; returns the last store."""
        where, last = self.units[number][0].of(batch), NOTHING
        if work.store_hidden:
            last = self.hidden[batch] = self.emit("download", "store_hidden", where, work.store_hidden, (end,))
        if work.store_kv:
            last = self.emit("download", "store_kv", where, work.store_kv, (end,))
        if work.write:
            last = self.emit("disk_write", "store_kv", where, work.write, (last, end))
        return last


class Stages:
    """The stages of a pipeline. A wave enters a stage a turn after it entered the one before; a step takes as many turns as there are
    waves, or stages where they are more, since what it begins with is chosen at the end of the step before."""

    def __init__(self, steps: Sequence[Sequence[UnitWork]], depth: int, emit: Emit, pipeline: Pipeline = ALONE) -> None:
        passed = Passed()
        self.stages = [Queues(steps, depth, emit, pipeline, stage, passed) for stage in range(pipeline.num_stages)]
        self.num_steps, self.waves = len(steps), len(pipeline.waves_of(len(steps[0][0].batches)))

    def steps(self) -> Iterator[float]:
        """The handle of each step's last compute task, the step emitted before. Of one turn the stages' units are emitted in turn."""
        period, last = max(self.waves, len(self.stages)), len(self.stages) - 1
        passes, end = [stage.passes() for stage in self.stages], NOTHING
        for turn in range(self.num_steps * period + last):
            now = [next(passes[stage]) if self._works(turn - stage, period) else iter(()) for stage in range(len(self.stages))]
            for ends in zip_longest(*now):
                end = end if ends[last] is None else ends[last]
            if self._works(turn - last, period) and (turn - last) % period == self.waves - 1:
                yield end

    def _works(self, turn: int, period: int) -> bool:
        return 0 <= turn < self.num_steps * period and turn % period < self.waves


def _cut(unit: UnitWork, wave: range, known: dict[tuple[int, range], UnitWork]) -> UnitWork:
    """The same for the micro-batches of a wave; what is equal stays one object."""
    if len(wave) == len(unit.batches):
        return unit
    key = id(unit), wave
    if key not in known:
        known[key] = replace(unit, batches=unit.batches[wave.start : wave.stop])
    return known[key]
