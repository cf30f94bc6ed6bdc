"""The schedule of a plan with a device: what it is made of, and its interpreters.

`chain_layout.lay_out` walks the zig-zag block and emits each task with its seconds and what it waits for. What "emit" means is the
interpreter's business: `Clock` keeps times alone, for the search; `Graph` keeps the tasks, for the simulator's timeline; the executor hands
them to the queues of real resources. Resources are serial servers that take their tasks in the order of emission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeAlias

from lmoffload_solver.pipeline import OWN, Pipeline, Place
from lmoffload_solver.schedule import Task
from lmoffload_solver.value import Kind, Resource

Server: TypeAlias = tuple[Resource, int]
"""A resource, and of which accelerator it is; the host's are those of 0."""


def server_of(resource: Resource, stage: int) -> Server:
    """The server of a resource at a stage."""
    return resource, stage if resource in OWN else 0


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


def busiest(busy: Mapping[Server, float]) -> dict[Resource, float]:
    """Busy seconds by resource: of those that every accelerator has, the busiest one's."""
    found: dict[Resource, float] = {}
    for (resource, _), seconds in busy.items():
        found[resource] = max(found.get(resource, 0.0), seconds)
    return found


class Clock:
    """Interpreter that keeps times alone: a handle is the end of its task."""

    def __init__(self, waking: Callable[[float], float] | None = None) -> None:
        """`waking`: seconds that the device loses after it was idle for some."""
        self.free: dict[Server, float] = {}
        self.waking = waking

    def emit(
        self, resource: Resource, kind: Kind, place: Place, seconds: float, after: tuple[float, ...], share: Share = WHOLE
    ) -> float:
        server = server_of(resource, place.stage)
        begin = self.free.get(server, 0.0)
        for end in after:
            if end > begin:
                begin = end
        if self.waking is not None and resource == "device":
            seconds += self.waking(begin - self.free.get(server, begin))
        end = self.free[server] = begin + seconds
        return end


class Graph:
    """Interpreter that keeps the tasks: a handle is a task's index."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.seconds: list[float] = []

    def emit(
        self, resource: Resource, kind: Kind, place: Place, seconds: float, after: tuple[float, ...], share: Share = WHOLE
    ) -> float:
        depends = tuple(sorted({int(index) for index in after if index >= 0}))
        stage = server_of(resource, place.stage)[1]
        self.tasks.append(Task(len(self.tasks), kind, place.step, place.unit, place.batch, resource, 0, depends, stage=stage))
        self.seconds.append(seconds)
        return len(self.tasks) - 1


NOTHING = float("-inf")
"""The handle of what never had to be waited for."""


def handing_on(layers: Sequence[UnitWork], pipeline: Pipeline, load: float, store: float) -> list[UnitWork]:
    """The layers of a step, hidden states going down from the last of each stage and up to the first of the next; and both ways around the
    host's attention there."""
    found = list(layers)
    for first in accumulate(pipeline.layers[:-1]):
        found[first - 1] = _carrying(found[first - 1], load, store, down=True)
        found[first] = _carrying(found[first], load, store, up=True)
    return found


def _carrying(unit: UnitWork, load: float, store: float, *, up: bool = False, down: bool = False) -> UnitWork:
    works = (
        replace(
            work,
            load_hidden=load if up or work.attend else work.load_hidden,
            store_hidden=store if down or work.attend else work.store_hidden,
        )
        for work in unit.batches
    )
    return replace(unit, batches=tuple(works))


def num_buffers(depth: int, host_attends: bool) -> int:
    """Buffers of weights on the device: the unit computed, those ahead, and where the host attends the unit before."""
    return depth + 1 + int(host_attends)
