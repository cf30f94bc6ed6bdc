"""Prices of one micro-batch at one layer (or half of one): what it computes, moves and quantizes, in seconds of each task alone.

`StepSize` may hold arrays: the prices of every micro-batch of the search's domain are then taken at once, by the same equations that price
the tasks of a simulated plan.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Literal

from lmoffload_solver import counting
from lmoffload_solver.chain_schedule import BatchWork
from lmoffload_solver.decision import Job, KVUnit, StepSize
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.lengths import Amount
from lmoffload_solver.model import TensorShape
from lmoffload_solver.processing import Attended, Formats
from lmoffload_solver.roofline_processing import elements_of, kv_elements
from lmoffload_solver.value import Tier

Part = Literal["layer", "attention", "mlp"]


class BatchPrices:
    """Prices for one format of keys and values and one home of the hidden states."""

    def __init__(self, job: Job, costs: DeviceCosts, kv_format: str, hidden: Tier) -> None:
        self.job, self.costs, self.kv_format, self.hidden = job, costs, kv_format, hidden
        self.model, self.runtime = job.model, costs.runtime
        self.parts: tuple[Part, ...] = ("attention", "mlp") if self.runtime.halves else ("layer",)
        self.kinds = job.kinds
        self.tensors = cache(self._tensors)
        self._one = cache(self._floats)

    def one(self, layer: int, part: Part, unit: KVUnit, size: StepSize, widening: float = 0.0) -> BatchWork:
        """Of a single micro-batch; layers that cost the same share what was computed once."""
        return self._one(self.kinds[layer], part, unit, size, widening)

    def _floats(self, layer: int, part: Part, unit: KVUnit, size: StepSize, widening: float) -> BatchWork:
        work = self.batch(layer, part, unit, size, widening)
        return BatchWork(**{field.name: float(getattr(work, field.name)) for field in fields(BatchWork)})

    def batch(self, layer: int, part: Part, unit: KVUnit, size: StepSize, widening: Amount = 0.0) -> BatchWork:
        """Weights at hand as the device computes with them, or widened in `widening` seconds."""
        processing = self.costs.processing
        load = self.load_hidden_s(size) if self.hidden != "device" else 0.0
        store = self.store_hidden_s(size) if self.hidden != "device" else 0.0
        kernels = processing.layer_s(self.model, layer, self.tensors(layer, part), size.tokens, len(self.parts), widening)
        if part == "mlp":
            return BatchWork(compute=kernels, load_hidden=load, store_hidden=store)
        return self._attending(BatchWork(compute=kernels, load_hidden=load, store_hidden=store), layer, part, unit, size)

    def load_hidden_s(self, size: StepSize) -> Amount:
        """Moving hidden states up."""
        return self.costs.upload_s(self._hidden_bytes(size), True)

    def store_hidden_s(self, size: StepSize) -> Amount:
        """Moving them down."""
        return self.costs.download_s(self._hidden_bytes(size), True)

    def _hidden_bytes(self, size: StepSize) -> Amount:
        return self.costs.processing.activation_bytes * self.model.hidden_size * size.tokens

    def head_s(self, size: StepSize) -> Amount:
        """The output head over one token of each sequence, sampling, and the embedding of the next."""
        return self.costs.processing.head_s(self.model, size.rows) + self.around_s(size)

    def around_s(self, size: StepSize) -> Amount:
        """A step's work outside the layers and the head's product."""
        overheads = self.costs.machine.overheads
        return overheads.step_s + overheads.row_s * size.rows

    def gain_s(self, layer: int | None, size: StepSize, formats: Formats, products: str) -> Amount:
        """What the products of a layer (None: of the head) take longer in these formats, taken so, where nothing is widened before them."""
        rows = size.rows if layer is None else size.tokens
        return self.costs.processing.product_gain_s(self.model, layer, rows, formats, products)

    def widening_s(self, layer: int | None, formats: Formats, part: Part = "layer") -> float:
        """Widening all quantized matrices of a layer or a part of it (None: the head)."""
        return self.costs.processing.widening_s((self.model.head,) if layer is None else self.tensors(layer, part), formats)

    def _tensors(self, layer: int, part: Part) -> tuple[TensorShape, ...]:
        """The matrices of a layer, or of one half."""
        matrices = counting.layer_matrices(self.model, layer)
        if part == "layer":
            return matrices
        return tuple(t for t in matrices if (t.tensor_class == "attention") == (part == "attention"))

    def _before_share(self, layer: int, part: Part) -> float:
        """Share of a layer's products that come before its attention: all but the output projection (a quarter of FlexGen's half)."""
        shape = self.model.layers[layer]
        inputs = self.model.hidden_size * (shape.num_heads * shape.key_dim + shape.num_kv_heads * (shape.key_dim + shape.value_dim))
        return min(1.0, inputs / max(1, elements_of(self.tensors(layer, part))))

    def _attending(self, work: BatchWork, layer: int, part: Part, unit: KVUnit, size: StepSize) -> BatchWork:
        """Attention and what becomes of keys and values."""
        costs, shape, kv_format, lengths = self.costs, self.model.layers[layer], self.kv_format, self.job.lengths
        processing, step, away = costs.processing, size.step, unit.home != "device"
        of = Attended(lengths, size.rows, size.first, size.end, self.job.gen_len)
        new = size.rows * (lengths.kept(shape.window, 0, *of.run) if step == 0 else 1.0)
        stored = processing.stored_kv_bytes(shape, of, step, kv_format)
        on_host = away and unit.attends == "host" and step > 0
        compute, after, attend, read, load = work.compute, 0.0, 0.0, 0.0, 0.0
        if step == 0:
            compute = compute + processing.prefill_attention_s(shape, of, kv_format)
        else:
            old = processing.loaded_kv_bytes(shape, of, step, kv_format)
            read = costs.read_s(old) if unit.home == "disk" else 0.0
            if on_host:
                attend = costs.host_attention_s(shape, of, step, kv_format)
                before = self._before_share(layer, part)
                compute, after = compute * before, compute * (1 - before)
            else:
                compute = compute + processing.decode_attention_s(shape, of, step, kv_format)
                if unit.home == "disk" and self.runtime.stages_disk:
                    read = read + costs.upload_s(old, True)
                elif away:
                    load = costs.upload_s(old, unit.home == "disk" or self.runtime.kv_page_locked)
        return BatchWork(
            read=read,
            load_kv=load,
            load_hidden=work.load_hidden,
            compute=compute,
            quantize=processing.quantize_s(kv_elements(shape, new), kv_format),
            attend=attend,
            after=after,
            store_kv=costs.download_s(stored, self.runtime.kv_page_locked) if away and not on_host else 0.0,
            store_hidden=work.store_hidden,
            write=costs.write_s(*processing.written_kv(shape, of, step, kv_format)) if unit.home == "disk" else 0.0,
        )
