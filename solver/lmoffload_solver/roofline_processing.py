"""Processing by a roofline: a device given by its rates, bandwidth and launches, a host given by rates.

A product takes the larger of FLOPs / rate(M) and bytes of its 16-bit weights / device bandwidth, and no less than its launches. Quantizing
and dequantizing are terms of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.accelerator import Accelerator, Way
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED, format_of
from lmoffload_solver.lengths import Amount
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.processing import Attended, Formats, Matrices
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import Tier

Work: TypeAlias = Literal["attention_prefill", "attention_decode", "quantize", "dequantize"]

DEVICE_ACTIVATION_BYTES = 2
"""Bytes of an activation, key or value as computed on the device: the checkpoint's 16-bit dtype."""

LAYER_LAUNCHES = 24
"""Kernels of a decoder layer's forward beside its products."""

REPEATED_TRAFFIC = 3
"""Repeating keys and values over their query heads reads them, writes the copy, and reads that."""


class LogCurve:
    """A rate over x, linear in the logarithms between points and flat beyond them, as `costs.rate_at`."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x, self.most = np.log(np.array(x, dtype=np.float64)), max(y)
        self.y = np.log(np.array(y, dtype=np.float64))

    def at(self, x: Amount) -> Amount:
        """The rate at x > 0."""
        if len(self.x) == 1:
            return self.most
        return np.exp(np.interp(np.log(x), self.x, self.y))


class RooflineProcessing:
    """Prices under a runtime; the host attends at `attention_share` of its rate.

    Raises:
        StatedError: the profile lacks a rate.
    """

    activation_bytes = DEVICE_ACTIVATION_BYTES
    keeps_ends = False
    task_s = 0.0

    def __init__(self, machine: MachineProfile, accelerator: Accelerator, runtime: Runtime, attention_share: Amount) -> None:
        self.machine, self.accelerator, self.runtime, self.attention_share = machine, accelerator, runtime, attention_share
        self._flops = LogCurve(accelerator.products.rows, accelerator.products.flops_per_s)
        self._elementwise: dict[tuple[str, int], int] = {}
        self._rates = {(rate.work, rate.tier, rate.way): rate.per_s for rate in machine.rates}

    def rate(self, work: Work, tier: Tier, way: Way) -> float:
        """A rate of the profile; the other way's where this one is not known."""
        other: Way = "eager" if way == "fused" else "fused"
        found = self._rates.get((work, tier, way)) or self._rates.get((work, tier, other))
        if found is None:
            raise StatedError(f"The machine profile {self.machine.name!r} has no rate for {work} on {tier}; profile it again.")
        return found

    # Products

    def product_s(self, rows: Amount, weights: int, count: int) -> Amount:
        """Products of `count` matrices with `weights` elements in all over `rows` rows."""
        return self._product_s(rows, weights, DEVICE_ACTIVATION_BYTES * weights, count, 1.0)

    def fused_product_s(self, rows: Amount, weights: int, num_bytes: float, count: int) -> Amount:
        """The same over quantized weights of `num_bytes`, dequantized in the inner loop."""
        return self._product_s(rows, weights, num_bytes, count, self.accelerator.fused_products_share)

    def _product_s(self, rows: Amount, weights: int, num_bytes: float, count: int, share: float) -> Amount:
        by_flops = counting.linear_flops(1, 1, weights) * rows / (self._flops.at(np.maximum(rows, 1.0)) * share)
        return np.maximum(by_flops, max(num_bytes / self.accelerator.memory_bytes_per_s, count * self.accelerator.launch_s))

    def elementwise_s(self, model: ModelShape, layer: int, tokens: Amount) -> Amount:
        """Norms, residuals, activation and rotary embedding of a layer, half as many bytes as in fp32."""
        num_bytes = self._elementwise_bytes(model, layer) * tokens * DEVICE_ACTIVATION_BYTES / counting.ACTIVATION_BYTES
        return np.maximum(num_bytes / self.accelerator.memory_bytes_per_s, LAYER_LAUNCHES * self.accelerator.launch_s)

    def _elementwise_bytes(self, model: ModelShape, layer: int) -> int:
        known = self._elementwise.get((model.name, layer))
        if known is None:
            known = self._elementwise[model.name, layer] = counting.elementwise_bytes(model, layer, 1)
        return known

    def layer_s(self, model: ModelShape, layer: int, tensors: Matrices, tokens: Amount, share: int, more_s: Amount) -> Amount:
        products = self.product_s(tokens, elements_of(tensors), len(tensors))
        rest = self.elementwise_s(model, layer, tokens) / share
        return np.maximum(products + rest + more_s, self.machine.overheads.layer_s / share) + self.runtime.batch_overhead_s

    def head_s(self, model: ModelShape, rows: Amount) -> Amount:
        return self.product_s(rows, elements_of((model.head,)), 1)

    def product_gain_s(self, model: ModelShape, layer: int | None, tokens: Amount, formats: Formats, products: str) -> Amount:
        if not self.in_products(products):
            return 0.0
        if layer is None:
            head = model.head
            if formats.get(head.tensor_class) not in QUANTIZED:
                return 0.0
            elements, num_bytes = elements_of((head,)), counting.tensor_bytes(head, formats[head.tensor_class])
            return self.fused_product_s(tokens, elements, num_bytes, 1) - self.product_s(tokens, elements, 1)
        matrices = counting.layer_matrices(model, layer)
        packed = [t for t in matrices if formats.get(t.tensor_class) in QUANTIZED]
        if not packed:
            return 0.0
        kept = [t for t in matrices if formats.get(t.tensor_class) not in QUANTIZED]
        num_bytes = sum(counting.tensor_bytes(t, formats[t.tensor_class]) for t in packed)
        fused = self.fused_product_s(tokens, elements_of(packed), num_bytes, len(packed))
        fused = fused + self.product_s(tokens, elements_of(kept), len(kept))
        plain = self.product_s(tokens, elements_of(matrices), len(matrices))
        rest, least = self.elementwise_s(model, layer, tokens), self.machine.overheads.layer_s
        return np.maximum(fused + rest, least) - np.maximum(plain + rest, least)

    def widening_s(self, tensors: Matrices, formats: Formats) -> float:
        return float(self.dequantize_s(elements_of([t for t in tensors if formats.get(t.tensor_class) in QUANTIZED])))

    def in_products(self, products: str) -> bool:
        return products == "dequantizing"

    # Attention

    def prefill_flops_s(self, flops: Amount) -> Amount:
        """Causal attention over prompts that takes `flops`; operator by operator every pair is computed, fused only those that count."""
        way = self.runtime.attending
        return flops * (2 if way == "eager" else 1) / self.rate("attention_prefill", "device", way)

    def decode_elements_s(self, elements: Amount) -> Amount:
        """So many elements of keys and values read once, in 16 bits."""
        return elements * DEVICE_ACTIVATION_BYTES / self.rate("attention_decode", "device", self.runtime.attending)

    def prefill_attention_s(self, shape: LayerShape, of: Attended, kv_format: str) -> Amount:
        def flops(lengths: Amount) -> Amount:
            return np.array([counting.prefill_attention_flops(shape, int(n)) for n in lengths])

        return self.prefill_flops_s(of.rows * of.lengths.mean(("pairs", shape), flops, *of.run))

    def decode_attention_s(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        elements = self._elements(shape, of, step)
        return self.decode_elements_s(elements) + (self.dequantize_s(elements) if kv_format in QUANTIZED else 0.0)

    def host_attention_s(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        """Keys and values read once, dequantized first where they are quantized, their heads repeated where the runtime does so, by the
        threads that the plan gives."""
        elements = self._elements(shape, of, step)
        repeats = shape.num_heads / shape.num_kv_heads if self.runtime.repeats_kv_heads else 1.0
        traffic = REPEATED_TRAFFIC * repeats if repeats > 1 else 1.0
        read = elements * DEVICE_ACTIVATION_BYTES * traffic / self.rate("attention_decode", "host", self.runtime.host_attending)
        spent = self.dequantize_s(elements, "host") if kv_format in QUANTIZED else 0.0
        return (read + spent) / self.attention_share

    def quantize_s(self, elements: Amount, kv_format: str) -> Amount:
        """Find the range, scale, round and pack."""
        return elements / self.rate("quantize", "device", self.runtime.quantizing) if kv_format in QUANTIZED else 0.0

    def dequantize_s(self, elements: Amount, tier: Tier = "device") -> Amount:
        """Unpack and scale."""
        return elements / self.rate("dequantize", tier, self.runtime.quantizing)

    # Keys and values

    def kv_room_bytes(self, shape: LayerShape, tokens: int, kv_format: str) -> float:
        return float(kv_bytes(shape, counting.kv_tokens(shape, tokens), kv_format))

    def loaded_kv_bytes(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        return kv_bytes(shape, of.rows * of.lengths.kept(shape.window, step - 1, *of.run), kv_format)

    def stored_kv_bytes(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> Amount:
        return kv_bytes(shape, of.rows * (of.lengths.kept(shape.window, 0, *of.run) if step == 0 else 1.0), kv_format)

    def written_kv(self, shape: LayerShape, of: Attended, step: int, kv_format: str) -> tuple[Amount, Amount]:
        return self.stored_kv_bytes(shape, of, step, kv_format), 0.0

    def _elements(self, shape: LayerShape, of: Attended, step: int) -> Amount:
        return kv_elements(shape, of.rows * of.lengths.kept(shape.window, step, *of.run))


def elements_of(tensors: Sequence[TensorShape]) -> int:
    """Elements of matrices."""
    return sum(n * k for n, k in map(counting.matrix_size, tensors))


def kv_elements(shape: LayerShape, kept: Amount) -> Amount:
    """Elements of a sequence's keys and values at a layer that keeps those of `kept` tokens."""
    return kept * shape.num_kv_heads * (shape.key_dim + shape.value_dim)


def kv_bytes(shape: LayerShape, kept: Amount, kv_format: str) -> Amount:
    """Their bytes; groups run over a token's whole key or value, as FlexGen's do."""
    return kv_elements(shape, kept) * format_of(kv_format).bits_per_element / 8
