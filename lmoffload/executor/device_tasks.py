"""What each task of a plan with a device does, when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lmoffload.executor.block import phase_kernel
from lmoffload.executor.device_batch import AT_ATTENTION, DeviceBatch
from lmoffload.executor.hidden_states import HiddenStates
from lmoffload.executor.row import Row
from lmoffload.executor.stage import BoundStage, Stage
from lmoffload.executor.tiered_kv import Changed, TieredKV
from lmoffload_solver.chain_schedule import Share
from lmoffload_solver.pipeline import Place
from lmoffload_solver.plan import kernel_for
from lmoffload_solver.value import Kind, Resource

if TYPE_CHECKING:
    from lmoffload.executor.device_runner import DeviceParts


class Taken(NamedTuple):
    """Tokens of a step."""

    tokens: int = 0
    held: int = 0
    """Keys and values that were kept for their rows, in tokens."""


@dataclass(slots=True)
class StageBlock:
    """What one accelerator has of a block."""

    bound: BoundStage
    batches: Sequence[DeviceBatch]
    kv: TieredKV
    hidden: HiddenStates
    changed: dict[int, Changed] = field(default_factory=dict)
    """By micro-batch: what its decode step stores."""
    reached: dict[int, int | None] = field(default_factory=dict)
    """By micro-batch: where its forward waits."""
    bound_to: int | None = None
    """Which use of buffers of weights is the current one."""

    @property
    def stage(self) -> Stage:
        return self.bound.stage

    def hands_on(self, batch: int) -> bool:
        """Whether a micro-batch waits for the next accelerator."""
        return not self.stage.is_last and self.reached.get(batch) == self.stage.units.stop


class DeviceTasks:
    """The tasks of one block. A micro-batch that has finished has nothing more to do."""

    def __init__(
        self,
        parts: DeviceParts,
        blocks: Sequence[StageBlock],
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self._parts, self._blocks, self._batches = parts, blocks, blocks[-1].batches
        self._stop_ids, self._decode = stop_ids, decode
        self.finished: dict[int, list[Row]] = {}
        """By step: the rows that finished with it."""
        self.taken: dict[int, Taken] = {}
        """By step: tokens that were chosen."""

    def run(self, resource: Resource, kind: Kind, place: Place, share: Share) -> Callable[[], None]:
        """The function of a task."""
        pipeline, block = self._parts.decision.pipeline, self._blocks[place.stage]
        sizes = len(self._parts.units), len(self._batches)
        number = pipeline.number(place, *sizes)
        if kind in ("read_weights", "upload_weights"):
            weights = block.bound.weights
            move = weights.read if kind == "read_weights" else weights.upload
            return partial(self._unless_all_done, partial(move, place.unit, number, share))
        assert place.batch is not None
        use = pipeline.use(place, *sizes)
        return partial(self._unless_done, place.batch, self._of_batch(block, resource, kind, place, place.batch, number, use))

    def abandon(self, stage: int) -> None:
        """Drop forwards that will not be finished; a task of the device."""
        for batch in self._blocks[stage].batches:
            batch.abandon()

    def _of_batch(
        self, block: StageBlock, resource: Resource, kind: Kind, place: Place, batch: int, number: int, use: int
    ) -> Callable[[], None]:
        kv, hidden, unit = block.kv, block.hidden, place.unit
        if kind in ("compute", "compute_before_attention"):
            return partial(self._compute, block, place.step, unit, batch, number, use, kind == "compute_before_attention")
        if kind == "compute_after_attention":
            return partial(self._take_up, block, place.step, unit, batch, number)
        if kind == "host_attention":
            return partial(self._host_attention, block, unit, batch, use)
        if kind == "load_hidden":
            return partial(self._load_hidden, block, unit, batch)
        if kind == "store_hidden":
            return lambda: hidden.park(batch, hand_on=block.hands_on(batch))
        if kind == "load_kv":
            return partial(kv.read if resource == "disk_read" else kv.load, unit, batch, use)
        assert kind == "store_kv"
        return partial(self._store, block, kv.write if resource == "disk_write" else kv.store, place.step, unit, batch, use)

    def _unless_done(self, batch: int, run: Callable[[], None]) -> None:
        if not self._batches[batch].done:
            run()

    def _unless_all_done(self, run: Callable[[], None]) -> None:
        if not all(batch.done for batch in self._batches):
            run()

    def _compute(self, block: StageBlock, step: int, unit_index: int, number: int, pass_number: int, use: int, hands_over: bool) -> None:
        batch, stage = block.batches[number], block.stage
        unit = self._parts.units[unit_index]
        with stage.accelerator.computing():
            self._enter(block, step, unit_index, number, pass_number)
            if unit_index == stage.units.start:
                self._begin(block, step, batch)
            if hands_over:
                batch.hands_over = unit.layer
            elif unit.kind == "layer":
                block.kv.stage(unit_index, number, use)
            reached = batch.resume(unit.kind == "head")
            expected = AT_ATTENTION if hands_over else None if unit_index + 1 == len(self._parts.units) else unit_index + 1
            assert reached == expected, "the forward does not follow the plan's units"
            self._leave(block, step, number, reached)

    def _begin(self, block: StageBlock, step: int, batch: DeviceBatch) -> None:
        """Begin a step of a micro-batch on an accelerator: with its tokens, or with what the accelerator before has handed on."""
        bound, is_first = block.bound, block.stage.index == 0
        batch.abandon()  # what was handed on in the step before
        reached = batch.begin(bound.model, self._blocks[-1].bound.weights.table_rows if is_first else self._no_rows)
        assert reached == block.stage.units.start, "the forward does not follow the plan's units"
        if is_first:
            for forward in batch.forwards:
                bound.meter.forward(*forward)
            bound.meter.padding_tokens += batch.padding
        if step:
            rows = np.array([i for i, row in enumerate(batch.rows) if row.active], dtype=np.int64)
            block.changed[batch.index] = Changed(rows, np.array(batch.positions, dtype=np.int64))

    def _no_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """In place of rows of the embedding table, where the hidden state that arrived takes their place."""
        return torch.zeros(len(token_ids), self._parts.shape.embedding.shape[-1])

    def _take_up(self, block: StageBlock, step: int, unit_index: int, number: int, pass_number: int) -> None:
        batch = block.batches[number]
        with block.stage.accelerator.computing():
            self._enter(block, step, unit_index, number, pass_number)
            batch.hands_over = None
            reached = batch.resume()
            assert reached == unit_index + 1, "the forward does not follow the plan's units"
            self._leave(block, step, number, reached)

    def _enter(self, block: StageBlock, step: int, unit_index: int, number: int, pass_number: int) -> None:
        """Make a unit and a micro-batch those that compute now."""
        plan, bound = self._parts.plan, block.bound
        if block.bound_to != pass_number:
            bound.weights.bind(self._parts.units[unit_index], pass_number)
            block.bound_to = pass_number
        chosen = phase_kernel if block.stage.accelerator.emulated else kernel_for
        bound.runtime.kernel = partial(chosen, plan.kernels.decode if step else plan.kernels.prefill)
        bound.runtime.batch = block.batches[number]
        bound.runtime.keep = partial(block.hidden.keep, number)
        bound.meter.phase = "decode" if step else "prefill"

    def _leave(self, block: StageBlock, step: int, number: int, reached: int | None) -> None:
        """At the output head, whose input has been taken from it, the hidden state goes; behind it tokens are chosen."""
        block.reached[number] = reached
        if reached == self._parts.shape.num_layers:
            block.hidden.drop(number, empty=True)
        elif reached is None:
            batch, pool = block.batches[number], block.stage.processor.pool
            if step == 0 and pool is not None:
                pool.give_back()  # decode steps need less
            self.finished.setdefault(step, []).extend(batch.take_tokens(self._stop_ids, self._decode))
            taken = self.taken.get(step, Taken())
            self.taken[step] = Taken(taken.tokens + batch.tokens_taken, taken.held + batch.tokens_held)

    def _load_hidden(self, block: StageBlock, unit: int, batch: int) -> None:
        begins = block.stage.index > 0 and unit == block.stage.units.start and block.reached.get(batch) != AT_ATTENTION
        block.hidden.fetch(batch, take_over=begins)

    def _host_attention(self, block: StageBlock, unit: int, number: int, use: int) -> None:
        block.kv.stage_beside(unit, number, use)
        with torch.no_grad():
            block.batches[number].attend_on_host(self._parts.host, block.stage.accelerator)

    def _store(
        self, block: StageBlock, store: Callable[[int, int, int, Changed | None], None], step: int, unit: int, batch: int, use: int
    ) -> None:
        store(unit, batch, use, block.changed[batch] if step else None)
