"""The schedule of a plan with a device, laid out once for both interpreters.

`lay_out` walks the zig-zag block and emits each task with its seconds and what it waits for. What "emit" means is the interpreter's
business: `Clock` keeps times alone, for the search; `Graph` keeps the tasks, for the simulator's timeline and for the executor. Resources
are serial servers that take their tasks in the order of emission.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lmoffload_solver.runtime import Runtime
from lmoffload_solver.schedule import Task
from lmoffload_solver.value import Kind, Resource

Place: TypeAlias = tuple[int, int, int | None]
"""(step, unit, micro-batch or None)."""

Emission: TypeAlias = tuple[Resource, Kind, Place, float]


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Seconds of one micro-batch at one unit, alone."""

    read: float = 0.0
    """KV from disk to host."""
    load_kv: float = 0.0
    load_hidden: float = 0.0
    compute: float = 0.0
    """On the device: all of it, or what comes before the host attends."""
    quantize: float = 0.0
    """Quantizing new keys and values, on the device."""
    attend: float = 0.0
    """On the host, query and output carried there and back included."""
    after: float = 0.0
    """On the device, after the host attended."""
    store_kv: float = 0.0
    store_hidden: float = 0.0
    write: float = 0.0
    """KV from host to disk."""


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Seconds of one unit of a step: its weights, and its micro-batches."""

    layer: int | None
    read: float
    """Weights from disk to host."""
    upload: float
    """Weights from host to device."""
    dequantize: float
    """Once for all micro-batches."""
    batches: tuple[BatchWork, ...]


Share: TypeAlias = tuple[int, int]
"""(number, of how many) equal parts of a unit's weights."""

WHOLE: Share = (0, 1)


class Emit(Protocol):
    """Takes a task; returns a handle to wait for."""

    def __call__(
        self, resource: Resource, kind: Kind, place: Place, seconds: float, after: tuple[float, ...], share: Share = WHOLE
    ) -> float: ...


class Clock:
    """Interpreter that keeps times alone: a handle is the end of its task."""

    def __init__(self) -> None:
        self.free: dict[Resource, float] = {}

    def emit(
        self, resource: Resource, kind: Kind, place: Place, seconds: float, after: tuple[float, ...], share: Share = WHOLE
    ) -> float:
        begin = self.free.get(resource, 0.0)
        for end in after:
            if end > begin:
                begin = end
        end = self.free[resource] = begin + seconds
        return end


class Graph:
    """Interpreter that keeps the tasks: a handle is a task's index."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.seconds: list[float] = []

    def emit(
        self, resource: Resource, kind: Kind, place: Place, seconds: float, after: tuple[float, ...], share: Share = WHOLE
    ) -> float:
        step, unit, batch = place
        depends = tuple(sorted({int(index) for index in after if index >= 0}))
        self.tasks.append(Task(len(self.tasks), kind, step, unit, batch, resource, 0, depends))
        self.seconds.append(seconds)
        return len(self.tasks) - 1


NOTHING = float("-inf")
"""The handle of what never had to be waited for."""


def lay_out(steps: Sequence[Sequence[UnitWork]], runtime: Runtime, depth: int, emit: Emit) -> list[float]:
    """Emit the tasks of the steps of a block; returns the handle of each step's last task."""
    return list(step_by_step(steps, runtime, depth, emit))


def step_by_step(steps: Sequence[Sequence[UnitWork]], runtime: Runtime, depth: int, emit: Emit) -> Iterator[float]:
    """The same, a step emitted whenever its handle is asked for."""
    if runtime.overlap == "queues":
        return Queues(steps, depth, emit).steps()
    return _in_turns(steps, runtime, emit)


def num_buffers(depth: int, host_attends: bool) -> int:
    """Buffers of weights on the device: the unit computed, those ahead, and where the host attends the unit before."""
    return depth + 1 + int(host_attends)


class Queues:
    """Every resource has its own queue.

    A unit's weights go up in one piece per micro-batch, between the loads of the unit that is computed `depth` units before, into one of
    depth + 1 buffers, free once all micro-batches have computed the unit that had it. Keys and values that are away, and hidden states,
    have two buffers, taken in turn by the uses (unit, micro-batch): a use is loaded while the one before computes, and computes when what
    the use two before left in its buffer has been stored.

    Where the host attends, the device goes on with the next micro-batch, and takes up the rest of the layer together with the
    beginning of the next: while the host attends to one micro-batch the device computes the others. A layer's weights are then needed one
    unit longer, so there is one buffer more. Hidden states that wait for the host's attention are stored and loaded around it.
    """

    def __init__(self, steps: Sequence[Sequence[UnitWork]], depth: int, emit: Emit) -> None:
        self.units = [(number, place, unit) for number, step in enumerate(steps) for place, unit in enumerate(step)]
        self.depth, self.emit = depth, emit
        different = {id(unit): unit for _, _, unit in self.units}.values()
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
        self.hidden: dict[int, float] = {}
        """Latest store of each micro-batch's hidden states."""

    def steps(self) -> Iterator[float]:
        """The handle of each step's last compute task, the step emitted before."""
        for ahead in range(min(self.depth, len(self.units))):
            self.weights(ahead, 0, 1)
        for number, (step, _, unit) in enumerate(self.units):
            if not self.depth:
                self.weights(number, 0, 1)
            self.unit(number, unit)
            if number + 1 == len(self.units) or self.units[number + 1][0] > step:
                yield self.computed[number]

    def weights(self, number: int, piece: int, pieces: int) -> None:
        """Emit one piece of a unit's weights."""
        if number >= len(self.units):
            return
        step, place, unit = self.units[number]
        before, share = number - self.buffers, (piece, pieces)
        free = self.computed[before] if before >= 0 else NOTHING
        if unit.read:
            self.staged[number] = self.emit("disk_read", "read_weights", (step, place, None), unit.read / pieces, (free,), share)
        if unit.upload:
            waits = (free, self.staged[number])
            self.uploaded[number] = self.emit("upload", "upload_weights", (step, place, None), unit.upload / pieces, waits, share)

    def unit(self, number: int, unit: UnitWork) -> None:
        """Emit one unit of a step."""
        step, place, _ = self.units[number]
        emit, batches = self.emit, unit.batches
        ready = self.uploaded[number]
        if unit.dequantize:
            ready = emit("device", "dequantize_weights", (step, place, None), unit.dequantize, (ready,))
        loaded = self.load(number, 0, batches[0], (self.done[0], self.sent[1], self.sent[0]))
        for batch, work in enumerate(batches):
            where = (step, place, batch)
            upcoming: tuple[float, ...] = ()
            if batch + 1 < len(batches):
                upcoming = self.load(number, batch + 1, batches[batch + 1], (self.done[1], self.sent[2], self.sent[1]))
            if self.depth:
                self.weights(number + self.depth, batch, len(batches))
            self.take_up(batch)
            kind: Kind = "compute_before_attention" if work.attend else "compute"
            end = emit("device", kind, where, work.compute, (ready, *loaded, self.sent[1]))
            if work.quantize:
                end = emit("device", "quantize_kv", where, work.quantize, ())
            self.done = [self.done[1], end]
            self.computed[number] = end
            self.sent = [*self.sent[1:], self.attend(number, batch, work, end) if work.attend else self.store(number, batch, work, end)]
            loaded = upcoming

    def attend(self, number: int, batch: int, work: BatchWork, end: float) -> float:
        """Emit the host's attention, and what is stored beside it; returns the last store."""
        step, place, _ = self.units[number]
        where, last = (step, place, batch), NOTHING
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
        step, place, _ = self.units[number]
        where: Place = (step, place, batch)
        waits: tuple[float, ...] = (attended,)
        if work.load_hidden:
            loaded = self.emit("upload", "load_hidden", where, work.load_hidden, (self.hidden.get(batch, NOTHING), self.done[0]))
            waits = (attended, loaded)
        self.computed[number] = self.emit("device", "compute_after_attention", where, work.after, waits)

    def load(self, number: int, batch: int, work: BatchWork, free: tuple[float, ...]) -> tuple[float, ...]:
        """Emit what a micro-batch needs from outside the device, once its buffers are free: the use two before computed and stored, and
        the one three before stored, which is the same keys' and values' where a step has three uses. Returns what computing waits for."""
        step, place, _ = self.units[number]
        where, waits = (step, place, batch), []
        if work.read:
            waits.append(self.emit("disk_read", "load_kv", where, work.read, free))
        if work.load_kv:
            waits.append(self.emit("upload", "load_kv", where, work.load_kv, (*free, *waits)))
        if work.load_hidden and batch not in self.deferred:
            waits.append(self.emit("upload", "load_hidden", where, work.load_hidden, (*free, self.hidden.get(batch, NOTHING))))
        return tuple(waits)

    def store(self, number: int, batch: int, work: BatchWork, end: float) -> float:
        """Emit what a micro-batch leaves outside the device; returns the last store."""
        step, place, _ = self.units[number]
        where, last = (step, place, batch), NOTHING
        if work.store_hidden:
            last = self.hidden[batch] = self.emit("download", "store_hidden", where, work.store_hidden, (end,))
        if work.store_kv:
            last = self.emit("download", "store_kv", where, work.store_kv, (end,))
        if work.write:
            last = self.emit("disk_write", "store_kv", where, work.write, (last, end))
        return last


def _in_turns(steps: Sequence[Sequence[UnitWork]], runtime: Runtime, emit: Emit) -> Iterator[float]:
    """Turns of one unit and micro-batch. Between barriers, the weights of the next unit (in the first turn of a unit), the loads and the
    stores of the micro-batch and its computing run at once; without overlap one after the other."""
    units = [(number, place, unit) for number, step in enumerate(steps) for place, unit in enumerate(step)]
    serial = runtime.overlap == "none"
    barrier: tuple[float, ...] = ()

    def turn(tasks: list[Emission]) -> None:
        nonlocal barrier
        handles: list[float] = []
        chain: tuple[float, ...] = barrier
        for resource, kind, place, seconds in tasks:
            if seconds:
                follows = serial or kind in _AFTER_OTHERS
                handles.append(emit(resource, kind, place, seconds, chain if follows and chain else barrier))
                chain = (handles[-1],)
        barrier = tuple(handles) or barrier

    first_step, first_place, first = units[0]
    turn(list(_weights(first_step, first_place, first)))
    for number, (step, place, unit) in enumerate(units):
        for batch, work in enumerate(unit.batches):
            tasks = list(_batch(step, place, batch, work, unit.dequantize if batch == 0 else 0.0))
            if batch == 0 and number + 1 < len(units):
                tasks += _weights(*units[number + 1])
            turn(tasks)
        if number + 1 == len(units) or units[number + 1][0] > step:
            yield max(barrier)


_AFTER_OTHERS: frozenset[Kind] = frozenset({"host_attention", "compute_after_attention"})
"""What follows the task emitted before it even where turns overlap."""


def _weights(step: int, place: int, unit: UnitWork) -> Iterator[Emission]:
    where = (step, place, None)
    yield "disk_read", "read_weights", where, unit.read
    yield "upload", "upload_weights", where, unit.upload


def _batch(step: int, place: int, batch: int, work: BatchWork, dequantize: float) -> Iterator[Emission]:
    where = (step, place, batch)
    yield "upload", "load_kv", where, work.load_kv
    yield "upload", "load_hidden", where, work.load_hidden
    yield "download", "store_kv", where, work.store_kv
    yield "download", "store_hidden", where, work.store_hidden
    yield "disk_write", "store_kv", where, work.write
    yield "disk_read", "load_kv", where, work.read
    yield "device", "dequantize_weights", where, dequantize
    yield "device", "quantize_kv", where, work.quantize
    yield "device", "compute_before_attention" if work.attend else "compute", where, work.compute
    yield "host_attention", "host_attention", where, work.attend
    yield "device", "compute_after_attention", where, work.after
