"""A stage of a pipeline: one accelerator with what it computes. A plan with one accelerator has one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmoffload.executor.meter import Meter
from lmoffload.executor.resources import Accelerator
from lmoffload.executor.stored_weights import StoredWeights
from lmoffload.executor.tiered_weights import TieredWeights
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import Processor
from lmoffload.modeling.bind import bind
from lmoffload.modeling.runtime import Runtime, Watch
from lmoffload_solver.model import ModelShape
from lmoffload_solver.schedule import Unit


@dataclass(frozen=True)
class Stage:
    """One accelerator."""

    index: int
    units: range
    """That it computes."""
    is_last: bool
    accelerator: Accelerator
    pool: Pool
    """Of what the device computes, where the host's kernels do."""
    processor: Processor
    """Of the device."""

    @property
    def reached(self) -> range:
        """Units that a forward reaches here: those that are computed, and where it waits for the next accelerator."""
        return self.units if self.is_last else range(self.units.start, self.units.stop + 1)


@dataclass(frozen=True)
class BoundStage:
    """The same with a model that computes on it."""

    stage: Stage
    model: Any
    runtime: Runtime
    weights: TieredWeights
    meter: Meter
    """What its products and attention are told to."""


def bind_model(
    model: Any,
    shape: ModelShape,
    units: Sequence[Unit],
    weights: StoredWeights,
    processor: Processor,
    watch: Watch,
    reached: range | None = None,
    layers_cut: bool = False,
) -> Runtime:
    """Put our parts into a model of transformers; returns what they ask.

    Args:
        reached: units at which its forwards stop on an accelerator; None: it is the host's own, and they stop at all.
        layers_cut: the host's forwards stop at matrices.

    Raises:
        StatedError: the checkpoint does not feed it.
    """
    heads = tuple(unit.index for unit in units if unit.kind == "head")
    runtime = Runtime(weights, processor, heads, watch)
    layers = [unit.index for unit in units if unit.kind == "layer"]
    parts = {unit.computes[0]: unit.index for unit in units if unit.kind == "part"}
    here = [index if reached is None or index in reached else None for index in layers]
    bind(model, shape, runtime, weights.vectors, here, parts, reached is not None or layers_cut)
    return runtime
