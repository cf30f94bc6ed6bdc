"""Seconds of each task of a plan with a device, alone: the machine's rates, the runtime's traits, the counted amounts.

A product takes the larger of FLOPs / rate(M) and bytes of its 16-bit weights / device bandwidth, and no less than its launches. Quantizing
and dequantizing are terms of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.accelerator import Accelerator, Way
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED, format_of
from lmoffload_solver.host_cores import HostShare
from lmoffload_solver.lengths import Amount
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
    """A rate over x, linear in the logarithms between points and flat beyond them, as `costs.rate_at`."""

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.x, self.most = np.log(np.array(x, dtype=np.float64)), max(y)
        self.y = np.log(np.array(y, dtype=np.float64))

    def at(self, x: Amount) -> Amount:
        """The rate at x > 0."""
        if len(self.x) == 1:
            return self.most
        return np.exp(np.interp(np.log(x), self.x, self.y))


class DeviceCosts:
    """Prices on one machine under one runtime; of one micro-batch, or of arrays of them.

    Raises:
        StatedError: the profile lacks the accelerator or a rate.
    """

    def __init__(self, machine: MachineProfile, disk: Disk, runtime: Runtime, share: HostShare | None = None) -> None:
        if machine.accelerator is None:
            raise StatedError(f"The machine profile {machine.name!r} has no accelerator.")
        self.machine, self.disk, self.runtime = machine, disk, runtime
        self.share = share or HostShare()
        self.accelerator: Accelerator = machine.accelerator
        products = self.accelerator.products
        self._flops = LogCurve(products.rows, products.flops_per_s)
        self._links = {(link.direction, link.page_locked): LogCurve(link.bytes_per_s.x, link.bytes_per_s.y) for link in machine.links}
        self._elementwise: dict[tuple[str, int], int] = {}
        self._read_bytes_per_s = [max(curve.bytes_per_s.y) for curve in disk.read]
        self._rates = {(rate.work, rate.tier, rate.way): rate.per_s for rate in machine.rates}

    def rate(self, work: Work, tier: Tier, way: Way) -> float:
        """A rate of the profile; the other way's where this one is not known."""
        other: Way = "eager" if way == "fused" else "fused"
        found = self._rates.get((work, tier, way)) or self._rates.get((work, tier, other))
        if found is None:
            raise StatedError(f"The machine profile {self.machine.name!r} has no rate for {work} on {tier}; profile it again.")
        return found

    # Transfers

    def upload_s(self, num_bytes: Amount, page_locked: bool) -> Amount:
        """Host to device."""
        return self._copy_s("upload", num_bytes, page_locked)

    def download_s(self, num_bytes: Amount, page_locked: bool) -> Amount:
        """Device to host."""
        return self._copy_s("download", num_bytes, page_locked)

    def link_rate(self, direction: Direction, page_locked: bool) -> float:
        """Best bytes per second of a direction."""
        return self._link(direction, page_locked).most

    def read_s(self, num_bytes: Amount) -> Amount:
        """Disk to host, in large requests."""
        return num_bytes / self.read_rate

    def write_s(self, num_bytes: Amount) -> Amount:
        """Host to disk; as fast as reading where writing was not measured."""
        return num_bytes / self._write_rate

    @cached_property
    def read_rate(self) -> float:
        """Best bytes per second of the disk, as the runtime reads it with the plan's threads."""
        measured = max(self._read_bytes_per_s)
        return min(measured, self.share.read_bytes_per_s or measured, self.runtime.disk_bytes_per_s or measured)

    @cached_property
    def _write_rate(self) -> float:
        return max((max(curve.bytes_per_s.y) for curve in self.disk.write), default=max(self._read_bytes_per_s))

    def _copy_s(self, direction: Direction, num_bytes: Amount, page_locked: bool) -> Amount:
        return num_bytes / self._link(direction, page_locked).at(np.maximum(num_bytes, 1.0))

    def _link(self, direction: Direction, page_locked: bool) -> LogCurve:
        found = self._links.get((direction, page_locked)) or self._links.get((direction, not page_locked))
        if found is None:
            raise StatedError(f"The machine profile {self.machine.name!r} has no {direction} measured; profile it again.")
        return found

    # On the device

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

    def prefill_attention_s(self, flops: Amount) -> Amount:
        """Causal attention over prompts that takes `flops`; operator by operator every pair is computed, fused only those that count."""
        way = self.runtime.attending
        return flops * (2 if way == "eager" else 1) / self.rate("attention_prefill", "device", way)

    def decode_attention_s(self, elements: Amount) -> Amount:
        """So many elements of keys and values read once, in 16 bits."""
        return elements * DEVICE_ACTIVATION_BYTES / self.rate("attention_decode", "device", self.runtime.attending)

    def quantize_s(self, elements: Amount, tier: Tier = "device") -> Amount:
        """Find the range, scale, round and pack."""
        return elements / self.rate("quantize", tier, self.runtime.quantizing)

    def dequantize_s(self, elements: Amount, tier: Tier = "device") -> Amount:
        """Unpack and scale."""
        return elements / self.rate("dequantize", tier, self.runtime.quantizing)

    # On the host

    def host_attention_s(self, shape: LayerShape, rows: Amount, elements: Amount, kv_format: str) -> Amount:
        """Keys and values read once, dequantized first where they are quantized, their heads repeated where the runtime does so, by the
        threads that the plan gives; query, new key and value are carried to the host, the output back."""
        repeats = shape.num_heads / shape.num_kv_heads if self.runtime.repeats_kv_heads else 1.0
        traffic = REPEATED_TRAFFIC * repeats if repeats > 1 else 1.0
        read = elements * DEVICE_ACTIVATION_BYTES * traffic / self.rate("attention_decode", "host", self.runtime.host_attending)
        spent = self.dequantize_s(elements, "host") if kv_format in QUANTIZED else 0.0
        query = rows * shape.num_heads * shape.key_dim * DEVICE_ACTIVATION_BYTES
        carried = query + rows * kv_elements(shape, 1) * DEVICE_ACTIVATION_BYTES
        return (read + spent) / self.share.attention + self.download_s(carried, True) + self.attention_output_s(shape, rows)

    def attention_output_s(self, shape: LayerShape, rows: Amount) -> Amount:
        """Carrying the output of the host's attention up."""
        return self.upload_s(rows * shape.num_heads * shape.value_dim * DEVICE_ACTIVATION_BYTES, True)


def kv_elements(shape: LayerShape, kept: Amount) -> Amount:
    """Elements of a sequence's keys and values at a layer that keeps those of `kept` tokens."""
    return kept * shape.num_kv_heads * (shape.key_dim + shape.value_dim)


def kv_bytes(shape: LayerShape, kept: Amount, kv_format: str) -> Amount:
    """Their bytes; groups run over a token's whole key or value, as FlexGen's do."""
    return kv_elements(shape, kept) * format_of(kv_format).bits_per_element / 8
