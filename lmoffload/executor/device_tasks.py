"""What each task of a plan with a device does, when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lmoffload.executor.block import phase_kernel
from lmoffload.executor.device_batch import AT_ATTENTION, DeviceBatch
from lmoffload.executor.hidden_states import HiddenStates
from lmoffload.executor.row import Row
from lmoffload.executor.tiered_kv import Changed, TieredKV
from lmoffload_solver.chain_schedule import Place, Share
from lmoffload_solver.plan import kernel_for
from lmoffload_solver.value import Kind, Resource

if TYPE_CHECKING:
    from lmoffload.executor.device_runner import DeviceParts


class Taken(NamedTuple):
    """Tokens of a step."""

    tokens: int = 0
    held: int = 0
    """Keys and values that were kept for their rows, in tokens."""


class DeviceTasks:
    """The tasks of one block. A micro-batch that has finished has nothing more to do."""

    def __init__(
        self,
        parts: DeviceParts,
        batches: Sequence[DeviceBatch],
        kv: TieredKV,
        hidden: HiddenStates,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self._parts, self._batches, self._kv, self._hidden = parts, batches, kv, hidden
        self._stop_ids, self._decode = stop_ids, decode
        self._bound: int | None = None
        self._changed: dict[int, Changed] = {}
        """By micro-batch: what its decode step stores."""
        self.finished: dict[int, list[Row]] = {}
        """By step: the rows that finished with it."""
        self.taken: dict[int, Taken] = {}
        """By step: tokens that were chosen."""

    def run(self, resource: Resource, kind: Kind, place: Place, share: Share) -> Callable[[], None]:
        """The function of a task."""
        step, unit, batch = place
        number = step * len(self._parts.units) + unit
        if kind == "read_weights":
            return partial(self._unless_all_done, partial(self._parts.weights.read, unit, number, share))
        if kind == "upload_weights":
            return partial(self._unless_all_done, partial(self._parts.weights.upload, unit, number, share))
        assert batch is not None
        use = number * len(self._batches) + batch
        return partial(self._unless_done, batch, self._of_batch(resource, kind, step, unit, batch, use))

    def abandon(self) -> None:
        """Drop forwards that will not be finished; a task of the device."""
        for batch in self._batches:
            batch.abandon()

    def _of_batch(self, resource: Resource, kind: Kind, step: int, unit: int, batch: int, use: int) -> Callable[[], None]:
        kv = self._kv
        if kind in ("compute", "compute_before_attention"):
            return partial(self._compute, step, unit, batch, use, kind == "compute_before_attention")
        if kind == "compute_after_attention":
            return partial(self._take_up, step, unit, batch)
        if kind == "host_attention":
            return partial(self._host_attention, unit, batch, use)
        if kind == "load_hidden":
            return partial(self._hidden.fetch, batch)
        if kind == "store_hidden":
            return partial(self._hidden.park, batch)
        if kind == "load_kv":
            return partial(kv.read if resource == "disk_read" else kv.load, unit, batch, use)
        assert kind == "store_kv"
        return partial(self._store, kv.write if resource == "disk_write" else kv.store, step, unit, batch, use)

    def _unless_done(self, batch: int, run: Callable[[], None]) -> None:
        if not self._batches[batch].done:
            run()

    def _unless_all_done(self, run: Callable[[], None]) -> None:
        if not all(batch.done for batch in self._batches):
            run()

    def _compute(self, step: int, unit_index: int, number: int, use: int, hands_over: bool) -> None:
        parts, batch = self._parts, self._batches[number]
        unit = parts.units[unit_index]
        with parts.accelerator.computing():
            self._enter(step, unit_index, number)
            if unit_index == 0:
                batch.begin(parts.model, parts.weights.table_rows)
                for forward in batch.forwards:
                    parts.meter.forward(*forward)
                parts.meter.padding_tokens += batch.padding
                if step:
                    rows = np.array([i for i, row in enumerate(batch.rows) if row.active], dtype=np.int64)
                    self._changed[number] = Changed(rows, np.array(batch.positions, dtype=np.int64))
            if hands_over:
                batch.hands_over = unit.layer
            elif unit.kind == "layer":
                self._kv.stage(unit_index, number, use)
            reached = batch.resume(unit.kind == "head")
            expected = AT_ATTENTION if hands_over else None if unit_index + 1 == len(parts.units) else unit_index + 1
            assert reached == expected, "the forward does not follow the plan's units"
            self._leave(step, number, reached)

    def _take_up(self, step: int, unit_index: int, number: int) -> None:
        batch = self._batches[number]
        with self._parts.accelerator.computing():
            self._enter(step, unit_index, number)
            batch.hands_over = None
            reached = batch.resume()
            assert reached == unit_index + 1, "the forward does not follow the plan's units"
            self._leave(step, number, reached)

    def _enter(self, step: int, unit_index: int, number: int) -> None:
        """Make a unit and a micro-batch those that compute now."""
        parts, runtime, batch = self._parts, self._parts.runtime, self._batches[number]
        use = step * len(parts.units) + unit_index
        if self._bound != use:
            parts.weights.bind(parts.units[unit_index], use)
            self._bound = use
        chosen = phase_kernel if parts.accelerator.emulated else kernel_for
        runtime.kernel = partial(chosen, parts.plan.kernels.decode if step else parts.plan.kernels.prefill)
        runtime.batch = batch
        runtime.keep = partial(self._hidden.keep, number)
        parts.meter.phase = "decode" if step else "prefill"

    def _leave(self, step: int, number: int, reached: int | None) -> None:
        """At the output head, whose input has been taken from it, the hidden state goes; behind it tokens are chosen."""
        if reached == self._parts.shape.num_layers:
            self._hidden.drop(number, empty=True)
        elif reached is None:
            batch = self._batches[number]
            self.finished.setdefault(step, []).extend(batch.take_tokens(self._stop_ids, self._decode))
            taken = self.taken.get(step, Taken())
            self.taken[step] = Taken(taken.tokens + batch.tokens_taken, taken.held + batch.tokens_held)

    def _host_attention(self, unit: int, number: int, use: int) -> None:
        self._kv.stage_beside(unit, number, use)
        with torch.no_grad():
            self._batches[number].attend_on_host(self._parts.host, self._parts.accelerator)

    def _store(self, store: Callable[[int, int, int, Changed | None], None], step: int, unit: int, batch: int, use: int) -> None:
        store(unit, batch, use, self._changed[batch] if step else None)
