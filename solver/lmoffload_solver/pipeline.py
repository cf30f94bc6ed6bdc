"""Pipeline: layers split among accelerators in a row, and a block's micro-batches cut into waves that follow one another through them.

A single accelerator is a pipeline of one stage and one wave. While one stage computes a wave the next one computes the wave before; a stage
moves its weights up once for every wave. Hidden states pass from stage to stage by way of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

from lmoffload_solver.value import Resource

OWN: frozenset[Resource] = frozenset({"device", "upload", "download"})
"""Resources that every accelerator has of its own; the others are the host's, and shared."""

MOST_SPLITS = 64
"""Ways to split the layers that are looked at, those nearest to equal parts first."""


class Place(NamedTuple):
    """Where a task stands in a block."""

    step: int
    unit: int
    batch: int | None
    """Micro-batch; None: what is done once for all of a wave."""
    wave: int = 0
    stage: int = 0
    """Accelerator."""

    def of(self, batch: int | None) -> Place:
        """The same place of another micro-batch."""
        return Place(self.step, self.unit, batch, self.wave, self.stage)


@dataclass(frozen=True)
class Pipeline:
    """How a model and a block pass through the accelerators."""

    layers: tuple[int, ...] = ()
    """Of each stage, in order; the output head belongs to the last. Empty: one stage has all."""
    waves: int = 1

    @property
    def num_stages(self) -> int:
        return max(1, len(self.layers))

    def stage_of(self, unit: int) -> int:
        """The stage that computes a unit: layers are the units 0, 1, ..., pieces of the output head come behind them."""
        return sum(unit >= end for end in accumulate(self.layers[:-1]))

    def layers_of(self, stage: int, num_layers: int) -> range:
        """Those of a stage."""
        ends = [0, *accumulate(self.layers)] if self.layers else [0, num_layers]
        return range(ends[stage], ends[stage + 1])

    def units_of(self, stage: int, num_units: int) -> range:
        """The units of a stage."""
        ends = [0, *accumulate(self.layers[:-1]), num_units]
        return range(ends[stage], ends[stage + 1])

    def number(self, place: Place, num_units: int, num_batches: int) -> int:
        """How many units a stage computes, of all waves, before the one of a task: weights have buffers in this order."""
        units, waves = self.units_of(place.stage, num_units), len(self.waves_of(num_batches))
        return (place.step * waves + place.wave) * len(units) + place.unit - units.start

    def use(self, place: Place, num_units: int, num_batches: int) -> int:
        """How many (unit, micro-batch) pairs it computes before that of a task: keys and values have buffers in this order."""
        units, wave = self.units_of(place.stage, num_units), self.waves_of(num_batches)[place.wave]
        assert place.batch is not None
        before = len(units) * (place.step * num_batches + wave.start)
        return before + (place.unit - units.start) * len(wave) + place.batch - wave.start

    def waves_of(self, num_batches: int) -> tuple[range, ...]:
        """The micro-batches of each wave; no more waves than there are."""
        waves = min(self.waves, num_batches)
        return tuple(range(wave * num_batches // waves, (wave + 1) * num_batches // waves) for wave in range(waves))


ALONE = Pipeline()


def splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Ways to split layers among stages, all of them or those nearest to equal parts; none where there are fewer layers than stages."""
    if num_stages == 1:
        yield ()
        return
    parts = [tuple(b - a for a, b in pairwise((0, *cuts, num_layers))) for cuts in _cuts(num_layers, num_stages)]
    parts.sort(key=lambda one: (max(one) - min(one), one))
    yield from parts[:MOST_SPLITS]


def _cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    if num_stages <= 3:
        yield from combinations(range(1, num_layers), num_stages - 1)
        return
    # Of many stages, each cut by up to one layer from where equal parts end.
    for code in range(3 ** (num_stages - 1)):
        cuts = tuple(num_layers * (i + 1) // num_stages + code // 3**i % 3 - 1 for i in range(num_stages - 1))
        if all(a < b for a, b in pairwise((0, *cuts, num_layers))):
            yield cuts
