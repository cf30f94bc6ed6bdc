"""The work of a decision: seconds by unit and micro-batch of every sampled step of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from lmoffload_solver.chain_prices import BatchPrices, Part, elements_of
from lmoffload_solver.chain_schedule import BatchWork, UnitWork
from lmoffload_solver.costs import Contention
from lmoffload_solver.decision import ChainBlock, Decision, Job, KVUnit, StepSize
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.formats import QUANTIZED
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
        contention = Contention.of(self.costs.machine, "upload", "host_attention")
        return _slowed(steps, self.runtime.overlap, contention)

    def step(self, block: ChainBlock, step: int) -> list[UnitWork]:
        """The units of one step: each layer or half of one, and the output head. Equal units are one object."""
        size = self.job.size(block, step)
        different, numbers = self._cut(block.num_batches)
        units = [self._unit(layer, part, moved, kv, size) for layer, part, moved, kv in different]
        return [*(units[number] for number in numbers), self._head(block, size)]

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
        widening = float(self.costs.dequantize_s(self._quantized(prices.tensors(layer, part))))
        if self.runtime.dequantizes_per == "micro_batch":
            return UnitWork(layer, read, upload, 0.0, tuple(prices.one(layer, part, unit, size, widening) for unit in kv))
        batches = tuple(prices.one(layer, part, unit, size) for unit in kv)
        if widening and decision.products(size.step) == "dequantizing":
            more = float(prices.fusing_s(layer, size, decision.formats))
            return UnitWork(layer, read, upload, 0.0, tuple(_recomputed(batch, more) for batch in batches))
        return UnitWork(layer, read, upload, widening, batches)

    def _weights_s(self, host_bytes: int, disk_bytes: int) -> tuple[float, float]:
        """(reading, uploading) what is not at home on the device."""
        locked = self.runtime.weights_page_locked
        read, from_disk = float(self.costs.read_s(disk_bytes)), float(self.costs.upload_s(disk_bytes, True))
        from_host = float(self.costs.upload_s(host_bytes, locked))
        return (read + from_disk, from_host) if self.runtime.stages_disk else (read, from_disk + from_host)

    def _quantized(self, tensors: Sequence[TensorShape]) -> int:
        return elements_of([t for t in tensors if self.decision.format_of(t) in QUANTIZED])

    def _head(self, block: ChainBlock, size: StepSize) -> UnitWork:
        head = self.model.head
        read, upload = self._weights(*self._moved((head,)))
        widening = float(self.costs.dequantize_s(self._quantized((head,))))
        compute = float(self.prices.head_s(size))
        if self.runtime.dequantizes_per == "micro_batch":
            compute, widening = compute + widening, 0.0
        elif widening and self.decision.products(size.step) == "dequantizing":
            compute, widening = compute + float(self.prices.fusing_s(None, size, self.decision.formats)), 0.0
        return UnitWork(None, read, upload, widening, (BatchWork(compute=compute),) * block.num_batches)


def _recomputed(work: BatchWork, more: float) -> BatchWork:
    """The same with products that take so much longer, before and after attention alike."""
    before = work.compute / (work.compute + work.after) if work.after else 1.0
    return replace(work, compute=work.compute + more * before, after=work.after + more * (1 - before))


def _slowed(steps: list[list[UnitWork]], overlap: str, slow: Contention) -> list[list[UnitWork]]:
    """Uploads and host attention stretched where they run at once: over a whole step between queues, turn by turn between barriers."""
    if overlap == "none" or slow == Contention():
        return steps
    return [_step_slowed(step, slow) for step in steps] if overlap == "queues" else _turns_slowed(steps, slow)


def _step_slowed(step: list[UnitWork], slow: Contention) -> list[UnitWork]:
    upload = sum(unit.upload + sum(b.load_kv + b.load_hidden for b in unit.batches) for unit in step)
    attend = sum(b.attend for unit in step for b in unit.batches)
    if not upload or not attend:
        return step
    both = slow.stretched(upload, attend)
    u, a = both[0] / upload, both[1] / attend
    stretched: dict[int, UnitWork] = {}
    for unit in step:
        if id(unit) not in stretched:
            stretched[id(unit)] = _stretched(unit, u, [(u, a)] * len(unit.batches))
    return [stretched[id(unit)] for unit in step]


def _turns_slowed(steps: list[list[UnitWork]], slow: Contention) -> list[list[UnitWork]]:
    flat = [unit for step in steps for unit in step]
    turns: dict[int, list[tuple[float, float]]] = {}
    weights = [1.0] * len(flat)
    for number, unit in enumerate(flat):
        following = flat[number + 1].upload if number + 1 < len(flat) else 0.0
        found = []
        for batch, work in enumerate(unit.batches):
            upload = work.load_kv + work.load_hidden + (following if batch == 0 else 0.0)
            if not upload or not work.attend:
                found.append((1.0, 1.0))
                continue
            both = slow.stretched(upload, work.attend)
            found.append((both[0] / upload, both[1] / work.attend))
        turns[number] = found
        if number + 1 < len(flat):
            weights[number + 1] = found[0][0]
    slowed = [_stretched(unit, weights[number], turns[number]) for number, unit in enumerate(flat)]
    ends = [0]
    for step in steps:
        ends.append(ends[-1] + len(step))
    return [slowed[first:end] for first, end in pairwise(ends)]


def _stretched(unit: UnitWork, weights: float, batches: Sequence[tuple[float, float]]) -> UnitWork:
    scaled = tuple(
        replace(work, load_kv=work.load_kv * u, load_hidden=work.load_hidden * u, attend=work.attend * a)
        for work, (u, a) in zip(unit.batches, batches, strict=True)
    )
    return replace(unit, upload=unit.upload * weights, batches=scaled)
