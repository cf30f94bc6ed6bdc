"""Slowing: the tasks of a block stretched by what resources that work at once do to each other.

Between queues as much as possible of a step's work of two resources is taken to be at once; between barriers that of a turn. What several
others cost a resource adds up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import TypeAlias, TypeVar

from lmoffload_solver.chain_schedule import BatchWork, Server, UnitWork, server_of
from lmoffload_solver.costs import Contention
from lmoffload_solver.pipeline import ALONE, OWN, Pipeline
from lmoffload_solver.value import Resource

Slowdowns: TypeAlias = Mapping[tuple[Resource, Resource], Contention]

Seconds: TypeAlias = dict[Resource, float]

K = TypeVar("K", bound=Hashable)
_Item = TypeVar("_Item")

BATCH: dict[str, Resource] = {
    "read": "disk_read",
    "load_kv": "upload",
    "load_hidden": "upload",
    "compute": "device",
    "quantize": "device",
    "after": "device",
    "attend": "host_attention",
    "store_kv": "download",
    "store_hidden": "download",
    "write": "disk_write",
}
"""Resource of each field of `BatchWork`."""

UNIT: dict[str, Resource] = {"read": "disk_read", "upload": "upload", "dequantize": "device"}
"""Of `UnitWork`."""

IN_TURN = frozenset({("device", "host_attention")})
"""Pairs that never work at once between barriers."""


def slowed(
    steps: list[list[UnitWork]], overlap: str, slowdowns: Slowdowns, pipeline: Pipeline = ALONE
) -> list[list[UnitWork]]:
    """The steps of a block, stretched."""
    if overlap == "none" or not slowdowns:
        return steps
    if overlap == "queues":
        return [_step_slowed(step, slowdowns, pipeline) for step in steps]
    return _turns_slowed(steps, {pair: slow for pair, slow in slowdowns.items() if pair not in IN_TURN})


def factors(alone: Mapping[K, float], slowdowns: Slowdowns, resource_of: Callable[[K], Resource]) -> dict[K, float]:
    """How much longer the work of each server takes where all of `alone` may be at once. resource_of: what a server is of."""
    more: dict[K, float] = {}
    for (first, second), slow in slowdowns.items():
        servers = [[key for key, seconds in alone.items() if seconds and resource_of(key) == one] for one in (first, second)]
        for here, there in combinations(servers[0], 2) if first == second else product(*servers):
            one, other = alone[here], alone[there]
            both = slow.stretched(one, other)
            more[here] = more.get(here, 0.0) + both[0] - one
            more[there] = more.get(there, 0.0) + both[1] - other
    return {server: 1 + seconds / alone[server] for server, seconds in more.items()}


def busy_of(units: Sequence[UnitWork], pipeline: Pipeline = ALONE) -> dict[Server, float]:
    """Seconds that each server works in a step: a stage's weights move once for every wave."""
    busy: dict[Server, float] = {}
    for stage in range(pipeline.num_stages):
        alone: Seconds = {}
        here = pipeline.units_of(stage, len(units))
        for unit, times in _counted(units[here.start : here.stop]):
            _add(alone, unit, UNIT, times * len(pipeline.waves_of(len(unit.batches))))
            for batch, of_unit in _counted(unit.batches):
                _add(alone, batch, BATCH, times * of_unit)
        for resource, seconds in alone.items():
            server = server_of(resource, stage)
            busy[server] = busy.get(server, 0.0) + seconds
    return busy


def _counted(items: Sequence[_Item]) -> Iterator[tuple[_Item, int]]:
    """Each object once, and how many times it is there."""
    different = {id(item): item for item in items}
    for number, times in Counter(map(id, items)).items():
        yield different[number], times


def _step_slowed(step: list[UnitWork], slowdowns: Slowdowns, pipeline: Pipeline) -> list[UnitWork]:
    if pipeline.waves == 1:  # stages take turns
        slowdowns = {pair: slow for pair, slow in slowdowns.items() if pair != ("device", "device")}
    found = factors(busy_of(step, pipeline), slowdowns, lambda server: server[0])
    if not found:
        return step
    slow: list[UnitWork] = []
    for stage in range(pipeline.num_stages):
        here = {resource: factor for (resource, at), factor in found.items() if at == stage or resource not in OWN}
        stretched: dict[int, UnitWork] = {}
        places = pipeline.units_of(stage, len(step))
        units = step[places.start : places.stop]
        for unit, _ in _counted(units):
            scaled = {id(batch): _scaled(batch, here) for batch, _ in _counted(unit.batches)}
            stretched[id(unit)] = _with_own(unit, here, [scaled[id(batch)] for batch in unit.batches])
        slow += [stretched[id(unit)] for unit in units]
    return slow


def _turns_slowed(steps: list[list[UnitWork]], slowdowns: Slowdowns) -> list[list[UnitWork]]:
    """The weights of the next unit come in a unit's first turn."""
    flat = [unit for step in steps for unit in step]
    turns: list[list[Seconds]] = []
    coming: list[Seconds] = [{}]
    for number, unit in enumerate(flat):
        found = []
        for batch, work in enumerate(unit.batches):
            alone: Seconds = {}
            _add(alone, work, BATCH)
            if batch == 0:
                alone["device"] = alone.get("device", 0.0) + unit.dequantize
                if number + 1 < len(flat):
                    _add(alone, flat[number + 1], {"read": "disk_read", "upload": "upload"})
            found.append(factors(alone, slowdowns, lambda resource: resource))
        turns.append(found)
        coming.append(found[0])
    slow = []
    for number, unit in enumerate(flat):
        weights = {**coming[number], "device": turns[number][0].get("device", 1.0)}
        slow.append(_with_own(unit, weights, [_scaled(work, found) for work, found in zip(unit.batches, turns[number], strict=True)]))
    ends = [0]
    for step in steps:
        ends.append(ends[-1] + len(step))
    return [slow[first:end] for first, end in pairwise(ends)]


def _add(alone: Seconds, work: BatchWork | UnitWork, fields: Mapping[str, Resource], times: int = 1) -> None:
    for name, resource in fields.items():
        seconds = getattr(work, name)
        if seconds:
            alone[resource] = alone.get(resource, 0.0) + times * seconds


def _with_own(unit: UnitWork, weights: Seconds, batches: Sequence[BatchWork]) -> UnitWork:
    """A unit with these micro-batches, and its own tasks longer by some factors."""
    own = {name: getattr(unit, name) * weights[resource] for name, resource in UNIT.items() if resource in weights}
    return replace(unit, batches=tuple(batches), **own)


def _scaled(work: BatchWork, found: Seconds) -> BatchWork:
    return replace(work, **{name: getattr(work, name) * found[resource] for name, resource in BATCH.items() if resource in found})
