"""The work of a decision: seconds by unit and micro-batch of every sampled step of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

from lmoffload_solver import counting
from lmoffload_solver.blocks import Step, decode_steps
from lmoffload_solver.chain_schedule import BatchWork, UnitWork
from lmoffload_solver.costs import Contention, LayerKind
from lmoffload_solver.decision import ChainBlock, Decision, Job, KVUnit
from lmoffload_solver.device_costs import DEVICE_ACTIVATION_BYTES, DeviceCosts, kv_bytes, kv_elements
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.value import TensorClass

Part = Literal["layer", "attention", "mlp"]


@dataclass(frozen=True)
class StepSize:
    """One step of one micro-batch."""

    step: int
    rows: float
    new_tokens: float
    """Per sequence: the prompt in prefill, one in decode."""
    context: float
    """Tokens of a sequence, the newest included."""

    @property
    def tokens(self) -> float:
        return self.rows * self.new_tokens


class ChainWork:
    """Prices a decision's units."""

    def __init__(self, job: Job, costs: DeviceCosts, decision: Decision) -> None:
        self.job, self.costs, self.decision = job, costs, decision
        self.model, self.runtime = job.model, decision.runtime
        self.steps = (Step(0, 1.0), *decode_steps(job.gen_len))
        self.parts: tuple[Part, ...] = ("attention", "mlp") if self.runtime.halves else ("layer",)
        self._in_layer: dict[int, tuple[TensorShape, ...]] = {}
        self._batch = cache(self._batch_work)
        self._matrices = cache(self._count_matrices)
        self._kinds = _kinds(job.model) if decision.homes else [0] * job.model.num_layers
        layers = range(job.model.num_layers) if decision.homes else ()
        self._units = [(layer, part, *self._moved(layer, part)) for layer in layers for part in self.parts]

    def block(self, block: ChainBlock) -> list[list[UnitWork]]:
        """The sampled steps of a block, tasks that slow each other stretched."""
        steps = [self.step(block, step.step) for step in self.steps]
        contention = Contention.of(self.costs.machine, "upload", "host_attention")
        return _slowed(steps, self.runtime.overlap, contention)

    def step(self, block: ChainBlock, step: int) -> list[UnitWork]:
        """The units of one step: each layer or half of one, and the output head."""
        length = self.job.mean_length
        size = StepSize(step, block.rows, length if step == 0 else 1.0, length + step)
        units = []
        known: dict[object, UnitWork] = {}
        for layer, part, tensors, moved in self._units:
            kv = self.decision.kv[layer][: block.num_batches]
            key = (self._kinds[layer], part, moved, kv)
            if key not in known:
                known[key] = self._unit(layer, part, tensors, kv, size)
            units.append(known[key])
        units.append(self._head(block, size))
        return units

    def _moved(self, layer: int, part: Part) -> tuple[tuple[TensorShape, ...], tuple[tuple[str, int], ...]]:
        tensors = self.tensors(layer, part)
        return tensors, tuple((self.decision.homes[t.name], self.decision.tensor_bytes(t)) for t in tensors)

    def batch(self, layer: int, unit: KVUnit, size: StepSize) -> BatchWork:
        """One micro-batch at a whole layer, weights at hand in 16 bits."""
        return self._batch_work(layer, "layer", unit, size, 0.0)

    def head_seconds(self, size: StepSize) -> float:
        """The output head over one token of each sequence, sampling, and the embedding of the next, weights at hand in 16 bits."""
        overheads = self.costs.machine.overheads
        return self.costs.product_s(size.rows, _elements(self.model.head), 1) + overheads.step_s + overheads.row_s * size.rows

    def tensors(self, layer: int, part: Part) -> tuple[TensorShape, ...]:
        """The matrices of a layer, or of one half."""
        if layer not in self._in_layer:
            self._in_layer[layer] = counting.layer_matrices(self.model, layer)
        matrices = self._in_layer[layer]
        if part == "layer":
            return matrices
        return tuple(t for t in matrices if (t.tensor_class == "attention") == (part == "attention"))

    def _unit(self, layer: int, part: Part, tensors: Sequence[TensorShape], kv: Sequence[KVUnit], size: StepSize) -> UnitWork:
        read, upload = self._weights_s(tensors)
        widening = self.costs.dequantize_s(self._quantized(tensors))
        if self.runtime.dequantizes_per == "micro_batch":
            return UnitWork(layer, read, upload, 0.0, tuple(self._batch(layer, part, unit, size, widening) for unit in kv))
        batches = tuple(self._batch(layer, part, unit, size, 0.0) for unit in kv)
        saved = self.fusing_s(layer, size, self.decision.formats) if self.runtime.fuses_products and widening else None
        if saved is None or saved * len(kv) >= widening:
            return UnitWork(layer, read, upload, widening, batches)
        fused = tuple(_recomputed(batch, saved) for batch in batches)
        return UnitWork(layer, read, upload, 0.0, fused)

    def fusing_s(self, layer: int, size: StepSize, formats: Mapping[TensorClass, str]) -> float:
        """What a micro-batch's products take longer when they dequantize in their inner loop, over 16-bit weights at hand; negative where
        reading fewer bytes saves more."""
        matrices = self.tensors(layer, "layer")
        packed = [t for t in matrices if formats.get(t.tensor_class) in QUANTIZED]
        kept = [t for t in matrices if formats.get(t.tensor_class) not in QUANTIZED]
        num_bytes = sum(counting.tensor_bytes(t, formats[t.tensor_class]) for t in packed)
        fused = self.costs.fused_product_s(size.tokens, sum(map(_elements, packed)), num_bytes, len(packed))
        fused += self.costs.product_s(size.tokens, sum(map(_elements, kept)), len(kept))
        plain = self.costs.product_s(size.tokens, sum(map(_elements, matrices)), len(matrices))
        rest, least = self.costs.elementwise_s(self.model, layer, size.tokens), self.costs.machine.overheads.layer_s
        return max(fused + rest, least) - max(plain + rest, least)

    def _weights_s(self, tensors: Sequence[TensorShape]) -> tuple[float, float]:
        """(reading, uploading) what of the tensors is not at home on the device."""
        decision = self.decision
        size = {tier: sum(decision.tensor_bytes(t) for t in tensors if decision.homes[t.name] == tier) for tier in ("host", "disk")}
        locked = self.runtime.weights_page_locked
        read = self.costs.read_s(size["disk"])
        from_disk = self.costs.upload_s(size["disk"], True)
        from_host = self.costs.upload_s(size["host"], locked)
        return (read + from_disk, from_host) if self.runtime.stages_disk else (read, from_disk + from_host)

    def _quantized(self, tensors: Sequence[TensorShape]) -> int:
        return sum(_elements(t) for t in tensors if self.decision.format_of(t) in QUANTIZED)

    def _batch_work(self, layer: int, part: Part, unit: KVUnit, size: StepSize, widening: float) -> BatchWork:
        costs = self.costs
        hidden = DEVICE_ACTIVATION_BYTES * self.model.hidden_size * size.tokens
        hidden_load = costs.upload_s(hidden, True) if self.decision.hidden != "device" else 0.0
        hidden_store = costs.download_s(hidden, True) if self.decision.hidden != "device" else 0.0
        elements, count = self._matrices(layer, part)
        products = costs.product_s(size.tokens, elements, count)
        share = len(self.parts)
        rest = costs.elementwise_s(self.model, layer, size.tokens) / share
        kernels = max(products + rest + widening, costs.machine.overheads.layer_s / share) + self.runtime.batch_overhead_s
        work = BatchWork(compute=kernels, load_hidden=hidden_load, store_hidden=hidden_store)
        if part == "mlp":
            return work
        return self._attending(work, layer, unit, size, before=self._before_share(layer, part))

    def _count_matrices(self, layer: int, part: Part) -> tuple[int, int]:
        """(elements, matrices) of a layer or a half."""
        tensors = self.tensors(layer, part)
        return sum(map(_elements, tensors)), len(tensors)

    def _before_share(self, layer: int, part: Part) -> float:
        """Share of a layer's products that come before its attention: all but the output projection (a quarter of FlexGen's half)."""
        shape = self.model.layers[layer]
        inputs = self.model.hidden_size * (shape.num_heads * shape.key_dim + shape.num_kv_heads * (shape.key_dim + shape.value_dim))
        return min(1.0, inputs / max(1, self._matrices(layer, part)[0]))

    def _attending(self, work: BatchWork, layer: int, unit: KVUnit, size: StepSize, before: float) -> BatchWork:
        """Attention and what becomes of keys and values."""
        costs, shape, kv_format = self.costs, self.model.layers[layer], self.decision.kv_format
        quantized = kv_format in QUANTIZED
        away = unit.home != "device"
        on_host = away and unit.attends == "host" and size.step > 0
        stored = size.rows * kv_bytes(shape, size.new_tokens, kv_format)
        compute, after, attend, read, load = work.compute, 0.0, 0.0, 0.0, 0.0
        if size.step == 0:
            compute += costs.prefill_attention_s(shape, size.rows, size.new_tokens)
        else:
            old = size.rows * kv_bytes(shape, size.context - 1, kv_format)
            read = costs.read_s(old) if unit.home == "disk" else 0.0
            if on_host:
                attend = costs.host_attention_s(shape, size.rows, size.context, kv_format)
                compute, after = compute * before, compute * (1 - before)
            else:
                widening = costs.dequantize_s(size.rows * kv_elements(shape, size.context)) if quantized else 0.0
                compute += costs.decode_attention_s(shape, size.rows, size.context) + widening
                if unit.home == "disk" and self.runtime.stages_disk:
                    read += costs.upload_s(old, True)
                elif away:
                    load = costs.upload_s(old, unit.home == "disk" or self.runtime.kv_page_locked)
        return BatchWork(
            read=read,
            load_kv=load,
            load_hidden=work.load_hidden,
            compute=compute,
            quantize=costs.quantize_s(size.rows * kv_elements(shape, size.new_tokens)) if quantized else 0.0,
            attend=attend,
            after=after,
            store_kv=costs.download_s(stored, self.runtime.kv_page_locked) if away and not on_host else 0.0,
            store_hidden=work.store_hidden,
            write=costs.write_s(stored) if unit.home == "disk" else 0.0,
        )

    def _head(self, block: ChainBlock, size: StepSize) -> UnitWork:
        head = self.model.head
        read, upload = self._weights_s((head,))
        widening = self.costs.dequantize_s(self._quantized((head,)))
        per_block = self.runtime.dequantizes_per == "block"
        batch = BatchWork(compute=self.head_seconds(size) + (0.0 if per_block else widening))
        return UnitWork(None, read, upload, widening if per_block else 0.0, (batch,) * block.num_batches)


def _recomputed(work: BatchWork, more: float) -> BatchWork:
    """The same with products that take so much longer, before and after attention alike."""
    before = work.compute / (work.compute + work.after) if work.after else 1.0
    return replace(work, compute=work.compute + more * before, after=work.after + more * (1 - before))


def _elements(tensor: TensorShape) -> int:
    n, k = counting.matrix_size(tensor)
    return n * k


def _kinds(model: ModelShape) -> list[int]:
    """Layers that cost the same have one number."""
    kinds = [LayerKind.of(model, layer) for layer in range(model.num_layers)]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return [numbers[kind] for kind in kinds]


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
    stretch = cache(lambda unit: _stretched(unit, u, [(u, a)] * len(unit.batches)))
    return [stretch(unit) for unit in step]


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
