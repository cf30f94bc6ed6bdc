"""The schedule of a plan with a device under runtimes that take turns, or do one thing after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from lmoffload_solver.chain_schedule import BatchWork, Emit, UnitWork
from lmoffload_solver.pipeline import Place
from lmoffload_solver.value import Kind, Resource

Emission: TypeAlias = tuple[Resource, Kind, Place, float]


def serially(steps: Sequence[Sequence[UnitWork]], emit: Emit) -> Iterator[float]:
    """One task after the other: a unit's weights, then of each micro-batch what it needs, its computing, what it leaves."""
    before: tuple[float, ...] = ()
    for number, step in enumerate(steps):
        for place, unit in enumerate(step):
            tasks = list(_weights(number, place, unit))
            for batch, work in enumerate(unit.batches):
                where = Place(number, place, batch)
                widening = unit.dequantize if batch == 0 else 0.0
                tasks += (*_loads(where, work), *_load_hidden(where, work), *_computing(where, work, widening), *_stores(where, work))
            for resource, kind, at, seconds in tasks:
                if seconds:
                    before = (emit(resource, kind, at, seconds, before),)
        yield max(before)


class Turns:
    """Turns of one unit and micro-batch, all of whose tasks begin when all of the turn before have ended: the weights of the next unit (in
    the first turn of a unit, in pieces that go up as they are read), what the next micro-batch needs, the computing, what the micro-batch
    before leaves. A buffer is filled when it has been emptied. Where there is one micro-batch alone, what it needs comes in its own turn,
    before its computing."""

    def __init__(self, steps: Sequence[Sequence[UnitWork]], emit: Emit) -> None:
        self.emit = emit
        self.units = [(number, place, unit) for number, step in enumerate(steps) for place, unit in enumerate(step)]
        self.uses = [(number, batch) for number, (_, _, unit) in enumerate(self.units) for batch in range(len(unit.batches))]
        self.barrier: tuple[float, ...] = ()
        self.handles: list[float] = []
        """Of the turn under way."""

    def steps(self) -> Iterator[float]:
        """The handle of each step's last turn, the step emitted before."""
        self.weights(0)
        self.needs(0, ())
        self.end()
        for use, (number, batch) in enumerate(self.uses):
            left = self.leaves(use - 1)
            self.needs(use + 1, left)
            if batch == 0:
                self.weights(number + 1)
            step, place, unit = self.units[number]
            where, work = Place(step, place, batch), unit.batches[batch]
            tasks = list(_computing(where, work, unit.dequantize if batch == 0 else 0.0))
            if len(unit.batches) == 1:
                tasks = [*_loads(where, work), *_load_hidden(where, work), *tasks, *_store_hidden(where, work)]
            self.chain(tasks)
            self.end()
            if use + 1 == len(self.uses):
                self.leaves(use)
                self.end()
            ends = number + 1 == len(self.units) or self.units[number + 1][0] > step
            if ends and batch + 1 == len(unit.batches):
                yield max(self.barrier)

    def end(self) -> None:
        """Let the next turn wait for this one."""
        self.barrier, self.handles = tuple(self.handles) or self.barrier, []

    def chain(self, tasks: Sequence[Emission], after: tuple[float, ...] = ()) -> tuple[float, ...]:
        """Tasks of this turn that follow one another; returns what follows the last."""
        before = (*self.barrier, *after)
        for resource, kind, where, seconds in tasks:
            if seconds:
                before = (self.emit(resource, kind, where, seconds, before),)
                self.handles += before
        return before

    def weights(self, number: int) -> None:
        """Those of a unit."""
        if number >= len(self.units):
            return
        step, place, unit = self.units[number]
        where = Place(step, place, None)
        pieces = TURN_PIECES if unit.read and unit.upload else 1
        for piece in range(pieces):
            before = self.barrier
            if unit.read:
                before = (self.emit("disk_read", "read_weights", where, unit.read / pieces, before, (piece, pieces)),)
                self.handles += before
            if unit.upload:
                self.handles.append(self.emit("upload", "upload_weights", where, unit.upload / pieces, before, (piece, pieces)))

    def needs(self, use: int, after: tuple[float, ...]) -> None:
        """What a use needs."""
        if use >= len(self.uses):
            return
        number, batch = self.uses[use]
        step, place, unit = self.units[number]
        if len(unit.batches) > 1:
            where, work = Place(step, place, batch), unit.batches[batch]
            self.chain(list(_loads(where, work)), after)
            self.chain(list(_load_hidden(where, work)), after)

    def leaves(self, use: int) -> tuple[float, ...]:
        """What a use leaves; returns what follows it."""
        if use < 0:
            return ()
        number, batch = self.uses[use]
        step, place, unit = self.units[number]
        where, work = Place(step, place, batch), unit.batches[batch]
        tasks = [*_stores(where, work)]
        if len(unit.batches) == 1:
            tasks = [task for task in tasks if task[1] != "store_hidden"]
        before = len(self.handles)
        self.chain(tasks)
        return tuple(self.handles[before:])


TURN_PIECES = 4
"""Of weights that are read and go up in one turn."""


def _weights(step: int, place: int, unit: UnitWork) -> Iterator[Emission]:
    where = Place(step, place, None)
    yield "disk_read", "read_weights", where, unit.read
    yield "upload", "upload_weights", where, unit.upload


def _loads(where: Place, work: BatchWork) -> Iterator[Emission]:
    yield "disk_read", "load_kv", where, work.read
    yield "upload", "load_kv", where, work.load_kv


def _load_hidden(where: Place, work: BatchWork) -> Iterator[Emission]:
    yield "upload", "load_hidden", where, work.load_hidden


def _store_hidden(where: Place, work: BatchWork) -> Iterator[Emission]:
    yield "download", "store_hidden", where, work.store_hidden


def _stores(where: Place, work: BatchWork) -> Iterator[Emission]:
    yield from _store_hidden(where, work)
    yield "download", "store_kv", where, work.store_kv
    yield "disk_write", "store_kv", where, work.write


def _computing(where: Place, work: BatchWork, widening: float) -> Iterator[Emission]:
    yield "device", "dequantize_weights", where, widening
    yield "device", "compute_before_attention" if work.attend else "compute", where, work.compute
    yield "device", "quantize_kv", where, work.quantize
    yield "host_attention", "host_attention", where, work.attend
    yield "device", "compute_after_attention", where, work.after
