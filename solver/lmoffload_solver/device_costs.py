"""Seconds of each task of a plan with a device, alone: the machine's rates, the runtime's traits, the counted amounts.

A product takes the larger of FLOPs / rate(M) and bytes of its 16-bit weights / device bandwidth, and no less than its launches. Quantizing
and dequantizing are terms of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from math import exp, log
from typing import Literal, TypeAlias

from lmoffload_solver import counting
from lmoffload_solver.accelerator import Accelerator, Way
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED, format_of
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.model import LayerShape, ModelShape
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import Tier

Work: TypeAlias = Literal["attention_prefill", "attention_decode", "quantize", "dequantize"]
Direction: TypeAlias = Literal["upload", "download"]

DEVICE_ACTIVATION_BYTES = 2
"""Bytes of an activation, key or value as computed on the device: the checkpoint's 16-bit dtype."""

LAYER_LAUNCHES = 24
"""Kernels of a decoder layer's forward beside its products."""

REPEATED_TRAFFIC = 3
"""Repeating keys and values over their query heads reads them, writes the copy, and reads that."""


class LogCurve:
    """A rate over x, linear in the logarithms between points and flat beyond them, as `costs.rate_at`; for one number at a time."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x, self.most = [log(value) for value in x], max(y)
        self.y = [log(value) for value in y]

    def at(self, x: float) -> float:
        """The rate at x > 0."""
        place = log(x)
        after = bisect_left(self.x, place)
        if after in (0, len(self.x)):
            return exp(self.y[max(0, after - 1)] if after else self.y[0])
        begin, end = self.x[after - 1], self.x[after]
        share = (place - begin) / (end - begin)
        return exp(self.y[after - 1] + share * (self.y[after] - self.y[after - 1]))


class DeviceCosts:
    """Prices on one machine under one runtime.

    Raises:
        StatedError: the profile lacks the accelerator or a rate.
    """

    def __init__(self, machine: MachineProfile, disk: Disk, runtime: Runtime) -> None:
        if machine.accelerator is None:
            raise StatedError(f"The machine profile {machine.name!r} has no accelerator.")
        self.machine, self.disk, self.runtime = machine, disk, runtime
        self.accelerator: Accelerator = machine.accelerator
        products = self.accelerator.products
        self._flops = LogCurve(products.rows, products.flops_per_s)
        self._links = {(link.direction, link.page_locked): LogCurve(link.bytes_per_s.x, link.bytes_per_s.y) for link in machine.links}
        self._elementwise: dict[tuple[str, int], int] = {}
        self._rates = {(rate.work, rate.tier, rate.way): rate.per_s for rate in machine.rates}

    def rate(self, work: Work, tier: Tier, way: Way) -> float:
        """A rate of the profile; the other way's where this one is not known."""
        other: Way = "eager" if way == "fused" else "fused"
        found = self._rates.get((work, tier, way)) or self._rates.get((work, tier, other))
        if found is None:
            raise StatedError(f"The machine profile {self.machine.name!r} has no rate for {work} on {tier}; profile it again.")
        return found

    # Transfers

    def upload_s(self, num_bytes: float, page_locked: bool) -> float:
        """Host to device."""
        return self._copy_s("upload", num_bytes, page_locked)

    def download_s(self, num_bytes: float, page_locked: bool) -> float:
        """Device to host."""
        return self._copy_s("download", num_bytes, page_locked)

    def link_rate(self, direction: Direction, page_locked: bool) -> float:
        """Best bytes per second of a direction."""
        return self._link(direction, page_locked).most

    def read_s(self, num_bytes: float) -> float:
        """Disk to host, in large requests."""
        return num_bytes / self.read_rate if num_bytes else 0.0

    def write_s(self, num_bytes: float) -> float:
        """Host to disk; as fast as reading where writing was not measured."""
        return num_bytes / self._write_rate if num_bytes else 0.0

    @cached_property
    def read_rate(self) -> float:
        """Best bytes per second of the disk, as the runtime reads it."""
        measured = max(max(curve.bytes_per_s.y) for curve in self.disk.read)
        return min(measured, self.runtime.disk_bytes_per_s or measured)

    @cached_property
    def _write_rate(self) -> float:
        return max((max(curve.bytes_per_s.y) for curve in self.disk.write), default=self.read_rate)

    def _copy_s(self, direction: Direction, num_bytes: float, page_locked: bool) -> float:
        if num_bytes < 1:
            return 0.0
        return num_bytes / self._link(direction, page_locked).at(num_bytes)

    def _link(self, direction: Direction, page_locked: bool) -> LogCurve:
        found = self._links.get((direction, page_locked)) or self._links.get((direction, not page_locked))
        if found is None:
            raise StatedError(f"The machine profile {self.machine.name!r} has no {direction} measured; profile it again.")
        return found

    # On the device

    def product_s(self, rows: float, weights: int, count: int) -> float:
        """Products of `count` matrices with `weights` elements in all over `rows` rows."""
        flops = self._flops.at(max(rows, 1.0))
        by_memory = DEVICE_ACTIVATION_BYTES * weights / self.accelerator.memory_bytes_per_s
        return max(counting.linear_flops(1, 1, weights) * rows / flops, by_memory, count * self.accelerator.launch_s)

    def fused_product_s(self, rows: float, weights: int, num_bytes: float, count: int) -> float:
        """The same over quantized weights of `num_bytes`, dequantized in the inner loop."""
        flops = self._flops.at(max(rows, 1.0)) * self.accelerator.fused_products_share
        by_memory = num_bytes / self.accelerator.memory_bytes_per_s
        return max(counting.linear_flops(1, 1, weights) * rows / flops, by_memory, count * self.accelerator.launch_s)

    def elementwise_s(self, model: ModelShape, layer: int, tokens: float) -> float:
        """Norms, residuals, activation and rotary embedding of a layer, half as many bytes as in fp32."""
        num_bytes = self._elementwise_bytes(model, layer) * tokens * DEVICE_ACTIVATION_BYTES / counting.ACTIVATION_BYTES
        return max(num_bytes / self.accelerator.memory_bytes_per_s, LAYER_LAUNCHES * self.accelerator.launch_s)

    def _elementwise_bytes(self, model: ModelShape, layer: int) -> int:
        known = self._elementwise.get((model.name, layer))
        if known is None:
            known = self._elementwise[model.name, layer] = counting.elementwise_bytes(model, layer, 1)
        return known

    def prefill_attention_s(self, shape: LayerShape, rows: float, length: float) -> float:
        """Causal attention over prompts; operator by operator every pair is computed, fused only those that count."""
        flops = rows * counting.prefill_attention_flops(shape, round(length))
        way = self.runtime.attending
        return flops * (2 if way == "eager" else 1) / self.rate("attention_prefill", "device", way)

    def decode_attention_s(self, shape: LayerShape, rows: float, context: float) -> float:
        """The KV cache read once, in 16 bits."""
        num_bytes = rows * kv_elements(shape, context) * DEVICE_ACTIVATION_BYTES
        return num_bytes / self.rate("attention_decode", "device", self.runtime.attending)

    def quantize_s(self, elements: float, tier: Tier = "device") -> float:
        """Find the range, scale, round and pack."""
        return elements / self.rate("quantize", tier, self.runtime.quantizing) if elements else 0.0

    def dequantize_s(self, elements: float, tier: Tier = "device") -> float:
        """Unpack and scale."""
        return elements / self.rate("dequantize", tier, self.runtime.quantizing) if elements else 0.0

    # On the host

    def host_attention_s(self, shape: LayerShape, rows: float, context: float, kv_format: str) -> float:
        """The KV cache read once, dequantized first where it is quantized, its heads repeated where the runtime does so; query, new key
        and value are carried to the host, the output back."""
        elements = rows * kv_elements(shape, context)
        repeats = shape.num_heads / shape.num_kv_heads if self.runtime.repeats_kv_heads else 1.0
        traffic = REPEATED_TRAFFIC * repeats if repeats > 1 else 1.0
        read = elements * DEVICE_ACTIVATION_BYTES * traffic / self.rate("attention_decode", "host", self.runtime.host_attending)
        spent = self.dequantize_s(elements, "host") if kv_format in QUANTIZED else 0.0
        query = rows * shape.num_heads * shape.key_dim * DEVICE_ACTIVATION_BYTES
        carried = query + rows * kv_elements(shape, 1) * DEVICE_ACTIVATION_BYTES
        output = rows * shape.num_heads * shape.value_dim * DEVICE_ACTIVATION_BYTES
        return read + spent + self.download_s(carried, True) + self.upload_s(output, True)


def kv_elements(shape: LayerShape, tokens: float) -> float:
    """Elements of a sequence's keys and values at a layer; a sliding window caps them."""
    kept = tokens if shape.window is None else min(tokens, shape.window)
    return kept * shape.num_kv_heads * (shape.key_dim + shape.value_dim)


def kv_bytes(shape: LayerShape, tokens: float, kv_format: str) -> float:
    """Bytes of a sequence's keys and values at a layer; groups run over a token's whole key or value, as FlexGen's do."""
    return kv_elements(shape, tokens) * format_of(kv_format).bits_per_element / 8
