"""Prices of one micro-batch at one layer (or half of one): what it computes, moves and quantizes, in seconds of each task alone.

`StepSize` may hold arrays: the prices of every micro-batch of the search's domain are then taken at once, by the same equations that price
the tasks of a simulated plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Literal

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.chain_schedule import BatchWork
from lmoffload_solver.decision import Job, KVUnit, StepSize
from lmoffload_solver.device_costs import DEVICE_ACTIVATION_BYTES, DeviceCosts, kv_bytes, kv_elements
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.lengths import Amount
from lmoffload_solver.model import TensorShape
from lmoffload_solver.value import TensorClass, Tier

Part = Literal["layer", "attention", "mlp"]


class BatchPrices:
    """Prices for one format of keys and values and one home of the hidden states."""

    def __init__(self, job: Job, costs: DeviceCosts, kv_format: str, hidden: Tier) -> None:
        self.job, self.costs, self.kv_format, self.hidden = job, costs, kv_format, hidden
        self.model, self.runtime = job.model, costs.runtime
        self.parts: tuple[Part, ...] = ("attention", "mlp") if self.runtime.halves else ("layer",)
        self.kinds = job.kinds
        self.tensors = cache(self._tensors)
        self._matrices = cache(self._count_matrices)
        self._one = cache(self._floats)

    def one(self, layer: int, part: Part, unit: KVUnit, size: StepSize, widening: float = 0.0) -> BatchWork:
        """Of a single micro-batch; layers that cost the same share what was computed once."""
        return self._one(self.kinds[layer], part, unit, size, widening)

    def _floats(self, layer: int, part: Part, unit: KVUnit, size: StepSize, widening: float) -> BatchWork:
        work = self.batch(layer, part, unit, size, widening)
        return BatchWork(**{field.name: float(getattr(work, field.name)) for field in fields(BatchWork)})

    def batch(self, layer: int, part: Part, unit: KVUnit, size: StepSize, widening: Amount = 0.0) -> BatchWork:
        """Weights at hand in 16 bits, or widened in `widening` seconds."""
        costs = self.costs
        hidden = DEVICE_ACTIVATION_BYTES * self.model.hidden_size * size.tokens
        load = costs.upload_s(hidden, True) if self.hidden != "device" else 0.0
        store = costs.download_s(hidden, True) if self.hidden != "device" else 0.0
        elements, count = self._matrices(layer, part)
        products = costs.product_s(size.tokens, elements, count)
        share = len(self.parts)
        rest = costs.elementwise_s(self.model, layer, size.tokens) / share
        kernels = np.maximum(products + rest + widening, costs.machine.overheads.layer_s / share) + self.runtime.batch_overhead_s
        if part == "mlp":
            return BatchWork(compute=kernels, load_hidden=load, store_hidden=store)
        return self._attending(BatchWork(compute=kernels, load_hidden=load, store_hidden=store), layer, part, unit, size)

    def head_s(self, size: StepSize) -> Amount:
        """The output head over one token of each sequence, sampling, and the embedding of the next, weights at hand in 16 bits."""
        return self.costs.product_s(size.rows, elements_of((self.model.head,)), 1) + self._around_s(size)

    def _around_s(self, size: StepSize) -> Amount:
        overheads = self.costs.machine.overheads
        return overheads.step_s + overheads.row_s * size.rows

    def fusing_s(self, layer: int | None, size: StepSize, formats: Mapping[TensorClass, str]) -> Amount:
        """What the products of a layer (None: of the head) take longer when they dequantize in their inner loop, over 16-bit weights at
        hand; negative where reading fewer bytes saves more."""
        costs = self.costs
        if layer is None:
            head = self.model.head
            num_bytes = counting.tensor_bytes(head, formats[head.tensor_class])
            elements = elements_of((head,))
            return costs.fused_product_s(size.rows, elements, num_bytes, 1) - costs.product_s(size.rows, elements, 1)
        matrices = self.tensors(layer, "layer")
        packed = [t for t in matrices if formats.get(t.tensor_class) in QUANTIZED]
        kept = [t for t in matrices if formats.get(t.tensor_class) not in QUANTIZED]
        num_bytes = sum(counting.tensor_bytes(t, formats[t.tensor_class]) for t in packed)
        fused = costs.fused_product_s(size.tokens, elements_of(packed), num_bytes, len(packed))
        fused = fused + costs.product_s(size.tokens, elements_of(kept), len(kept))
        plain = costs.product_s(size.tokens, elements_of(matrices), len(matrices))
        rest, least = costs.elementwise_s(self.model, layer, size.tokens), costs.machine.overheads.layer_s
        return np.maximum(fused + rest, least) - np.maximum(plain + rest, least)

    def widening_s(self, layer: int | None, formats: Mapping[TensorClass, str]) -> float:
        """Widening all quantized matrices of a layer (None: the head)."""
        tensors = (self.model.head,) if layer is None else self.tensors(layer, "layer")
        return float(self.costs.dequantize_s(elements_of([t for t in tensors if formats.get(t.tensor_class) in QUANTIZED])))

    def _tensors(self, layer: int, part: Part) -> tuple[TensorShape, ...]:
        """The matrices of a layer, or of one half."""
        matrices = counting.layer_matrices(self.model, layer)
        if part == "layer":
            return matrices
        return tuple(t for t in matrices if (t.tensor_class == "attention") == (part == "attention"))

    def _count_matrices(self, layer: int, part: Part) -> tuple[int, int]:
        """(elements, matrices) of a layer or a half."""
        tensors = self.tensors(layer, part)
        return elements_of(tensors), len(tensors)

    def _before_share(self, layer: int, part: Part) -> float:
        """Share of a layer's products that come before its attention: all but the output projection (a quarter of FlexGen's half)."""
        shape = self.model.layers[layer]
        inputs = self.model.hidden_size * (shape.num_heads * shape.key_dim + shape.num_kv_heads * (shape.key_dim + shape.value_dim))
        return min(1.0, inputs / max(1, self._matrices(layer, part)[0]))

    def _attending(self, work: BatchWork, layer: int, part: Part, unit: KVUnit, size: StepSize) -> BatchWork:
        """Attention and what becomes of keys and values."""
        costs, shape, kv_format, lengths = self.costs, self.model.layers[layer], self.kv_format, self.job.lengths
        quantized, away = kv_format in QUANTIZED, unit.home != "device"
        run = (size.first, size.end)
        new = size.rows * (lengths.kept(shape.window, 0, *run) if size.step == 0 else 1.0)
        stored = kv_bytes(shape, new, kv_format)
        on_host = away and unit.attends == "host" and size.step > 0
        compute, after, attend, read, load = work.compute, 0.0, 0.0, 0.0, 0.0
        if size.step == 0:
            pairs = ("pairs", shape)
            flops = lengths.mean(pairs, lambda all_: np.array([counting.prefill_attention_flops(shape, int(n)) for n in all_]), *run)
            compute = compute + costs.prefill_attention_s(size.rows * flops)
        else:
            old = kv_bytes(shape, size.rows * lengths.kept(shape.window, size.step - 1, *run), kv_format)
            elements = kv_elements(shape, size.rows * lengths.kept(shape.window, size.step, *run))
            read = costs.read_s(old) if unit.home == "disk" else 0.0
            if on_host:
                attend = costs.host_attention_s(shape, size.rows, elements, kv_format)
                before = self._before_share(layer, part)
                compute, after = compute * before, compute * (1 - before)
            else:
                compute = compute + costs.decode_attention_s(elements) + (costs.dequantize_s(elements) if quantized else 0.0)
                if unit.home == "disk" and self.runtime.stages_disk:
                    read = read + costs.upload_s(old, True)
                elif away:
                    load = costs.upload_s(old, unit.home == "disk" or self.runtime.kv_page_locked)
        return BatchWork(
            read=read,
            load_kv=load,
            load_hidden=work.load_hidden,
            compute=compute,
            quantize=costs.quantize_s(kv_elements(shape, new)) if quantized else 0.0,
            attend=attend,
            after=after,
            store_kv=costs.download_s(stored, self.runtime.kv_page_locked) if away and not on_host else 0.0,
            store_hidden=work.store_hidden,
            write=costs.write_s(stored) if unit.home == "disk" else 0.0,
        )


def elements_of(tensors: Sequence[TensorShape]) -> int:
    """Elements of matrices."""
    return sum(n * k for n, k in map(counting.matrix_size, tensors))

