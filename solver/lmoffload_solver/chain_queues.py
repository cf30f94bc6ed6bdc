"""The schedule of a plan with a device where every resource has its own queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmoffload_solver.chain_schedule import NOTHING, BatchWork, Emit, Place, UnitWork, num_buffers
from lmoffload_solver.value import Kind


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
