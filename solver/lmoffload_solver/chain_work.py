"""The work of a decision: seconds by unit and micro-batch of every sampled step of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from lmoffload_solver.chain_prices import BatchPrices, Part
from lmoffload_solver.chain_schedule import BatchWork, UnitWork, handing_on
from lmoffload_solver.chain_slowing import slowed
from lmoffload_solver.chain_tasks import head_pieces
from lmoffload_solver.decision import ChainBlock, Decision, Job, KVUnit, StepSize
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.model import TensorShape


class ChainWork:
    """Prices a decision's units. `prices` are those of its runtime, its format of keys and values and its hidden states; made here unless
    given."""

    def __init__(self, job: Job, costs: DeviceCosts, decision: Decision, prices: BatchPrices | None = None) -> None:
        self.job, self.costs, self.decision = job, costs, decision
        self.model, self.runtime, self.steps = job.model, decision.runtime, job.steps
        self.prices = prices or BatchPrices(job, costs, decision.kv_format, decision.hidden)
        self._weights = cache(self._weights_s)
        layers, parts = range(self.model.num_layers), self.prices.parts
        self._moved_bytes = {(layer, part): self._moved(self.prices.tensors(layer, part)) for layer in layers for part in parts}
        self._cut = cache(self._kinds)

    def block(self, block: ChainBlock) -> list[list[UnitWork]]:
        """The sampled steps of a block, tasks that slow each other stretched."""
        steps = [self.step(block, step.step) for step in self.steps]
        return slowed(steps, self.runtime.overlap, self.costs.contention, self.decision.pipeline)

    def step(self, block: ChainBlock, step: int) -> list[UnitWork]:
        """The units of one step: each layer or half of one, and the output head or its pieces. Equal units are one object."""
        size = self.job.size(block, step)
        different, numbers = self._cut(block.num_batches)
        units = [self._unit(layer, part, moved, kv, size) for layer, part, moved, kv in different]
        layers = [units[number] for number in numbers]
        if self.costs.processing.keeps_ends:
            layers[0] = _replaced(layers[0], load_hidden=0.0)
            layers[-1] = _replaced(layers[-1], store_hidden=0.0)
        up, down = float(self.prices.load_hidden_s(size)), float(self.prices.store_hidden_s(size))
        return [*handing_on(layers, self.decision.pipeline, up, down), *self._heads(block, size)]

    def _kinds(self, num_batches: int) -> tuple[list[tuple[int, Part, tuple[int, int], tuple[KVUnit, ...]]], list[int]]:
        """The different units of a step, each by the first like it, and for every unit the number of its kind."""
        first: dict[object, int] = {}
        different: list[tuple[int, Part, tuple[int, int], tuple[KVUnit, ...]]] = []
        numbers: list[int] = []
        for (layer, part), moved in self._moved_bytes.items():
            kv = self.decision.kv[layer][:num_batches]
            number = first.setdefault((self.job.kinds[layer], part, moved, kv), len(first))
            if number == len(different):
                different.append((layer, part, moved, kv))
            numbers.append(number)
        return different, numbers

    def _moved(self, tensors: Sequence[TensorShape]) -> tuple[int, int]:
        """Bytes of tensors at home on the host, on disk."""
        size = {"device": 0, "host": 0, "disk": 0}
        for tensor in tensors:
            size[self.decision.homes[tensor.name]] += self.decision.tensor_bytes(tensor)
        return size["host"], size["disk"]

    def _unit(self, layer: int, part: Part, moved: tuple[int, int], kv: Sequence[KVUnit], size: StepSize) -> UnitWork:
        read, upload = self._weights(*moved)
        prices, decision = self.prices, self.decision
        widening = prices.widening_s(layer, decision.formats, part)
        if self.runtime.dequantizes_per == "micro_batch":
            return UnitWork(layer, read, upload, 0.0, tuple(prices.one(layer, part, unit, size, widening) for unit in kv))
        batches, products = tuple(prices.one(layer, part, unit, size) for unit in kv), decision.products(size.step)
        if self.costs.processing.in_products(products):
            more = float(prices.gain_s(layer, size, decision.formats, products))
            return UnitWork(layer, read, upload, 0.0, tuple(_recomputed(batch, more) for batch in batches) if more else batches)
        return UnitWork(layer, read, upload, widening, batches)

    def _weights_s(self, host_bytes: int, disk_bytes: int) -> tuple[float, float]:
        """(reading, uploading) what is not at home on the device."""
        locked = self.runtime.weights_page_locked
        read, from_disk = float(self.costs.read_s(disk_bytes)), float(self.costs.upload_s(disk_bytes, True))
        from_host = float(self.costs.upload_s(host_bytes, locked))
        return (read + from_disk, from_host) if self.runtime.stages_disk else (read, from_disk + from_host)

    def _heads(self, block: ChainBlock, size: StepSize) -> list[UnitWork]:
        """The output head; where it moves up in pieces, each is a unit, and sampling belongs to the last."""
        whole = self._head(block, size)
        pieces = head_pieces(self.model, self.decision) if self.costs.processing.keeps_ends else ()
        if len(pieces) < 2:
            return [whole]
        around = float(self.prices.around_s(size))
        product = whole.batches[0].compute - around - self.costs.processing.task_s
        moved, units = self._moved((self.model.head,)), []
        for first, end in pieces:
            share = (end - first) / pieces[-1][1]
            read, upload = self._weights(round(moved[0] * share), round(moved[1] * share))
            seconds = product * share + self.costs.processing.task_s + (around if (first, end) == pieces[-1] else 0.0)
            units.append(UnitWork(None, read, upload, 0.0, (BatchWork(compute=seconds),) * block.num_batches))
        return units

    def _head(self, block: ChainBlock, size: StepSize) -> UnitWork:
        head = self.model.head
        read, upload = self._weights(*self._moved((head,)))
        widening = self.prices.widening_s(None, self.decision.formats)
        compute, products = float(self.prices.head_s(size)), self.decision.products(size.step)
        if self.runtime.dequantizes_per == "micro_batch":
            compute, widening = compute + widening, 0.0
        elif self.costs.processing.in_products(products):
            compute, widening = compute + float(self.prices.gain_s(None, size, self.decision.formats, products)), 0.0
        return UnitWork(None, read, upload, widening, (BatchWork(compute=compute),) * block.num_batches)


def _replaced(unit: UnitWork, **fields: float) -> UnitWork:
    """The unit with these fields of every micro-batch that the host does not attend to."""
    return replace(unit, batches=tuple(work if work.attend else replace(work, **fields) for work in unit.batches))


def _recomputed(work: BatchWork, more: float) -> BatchWork:
    """The same with products that take so much longer, before and after attention alike."""
    before = work.compute / (work.compute + work.after) if work.after else 1.0
    return replace(work, compute=work.compute + more * before, after=work.after + more * (1 - before))
