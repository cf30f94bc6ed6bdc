"""Seconds for each task on a given machine. Rates come from measured curves, interpolated log-log and extended flat at both ends.

A resource's time in a step is the sum of its tasks. `MachineCosts` prices single pieces of work; `blocks.py` adds them up over the
sequences of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import AttentionCurve, Curve, Disk, LinearCurve, MachineProfile
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.plan import kernel_for
from lmoffload_solver.schedule import READ_REQUEST_BYTES
from lmoffload_solver.value import Resource, Tier

Array = counting.Array
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")

COMPUTE_RESOURCE: dict[Tier, Resource] = {"device": "device", "host": "host_compute"}
"""The server that computes where a tier's memory is."""

READ_RESOURCE: dict[Tier, Resource] = {"disk": "disk_read", "host": "upload"}
"""The server that moves bytes from a tier one step nearer to the compute tier."""

ANY_FORMAT_KERNEL = "fused_dot"
"""The kernel that the executor takes for a stored format that a phase's kernel does not take."""

ACTIVITY_NAMES: dict[Resource, frozenset[str]] = {
    "disk_read": frozenset({"disk_read", "disk_io", "disk"}),
    "host_compute": frozenset({"host_compute", "compute"}),
    "upload": frozenset({"upload", "copy"}),
    "host_attention": frozenset({"host_attention"}),
    "download": frozenset({"download"}),
    "device": frozenset({"device"}),
}
"""A profile's contention entries name activities by resource or by class of task."""


def chain_of(machine: MachineProfile) -> tuple[Tier, ...]:
    """The tiers from the compute tier outward.

    Raises:
        StatedError: the machine has no disk measured.
    """
    if not machine.disks:
        raise StatedError(f"The machine profile {machine.name!r} has no disk measured; run `lmoffload profile --disk PATH`.")
    return ("host", "disk")


def disk_of(machine: MachineProfile, file_system: str | None) -> Disk:
    """The disk that holds a file system (its mount point); the first one measured when none is named.

    Raises:
        StatedError: that file system was never measured.
    """
    for disk in machine.disks:
        if file_system in (None, disk.file_system):
            return disk
    known = ", ".join(disk.file_system for disk in machine.disks) or "none"
    raise StatedError(f"The disk at {file_system} was not measured (measured: {known}); run `lmoffload profile --disk {file_system}`.")


def rate_at(curve: Curve, x: float | Array) -> Array:
    """Rate of a curve at x: linear in log rate over log x between points, flat beyond them."""
    return np.asarray(np.exp(np.interp(np.log(x), np.log(curve.x), np.log(curve.y))))


@dataclass(frozen=True)
class Contention:
    """Slowdown of reading and computing while both run: time together / time alone, each at least 1.

    Where 1/read + 1/compute < 1, running both at once is slower than one after the other; the pair is then scaled to equality.
    """

    read: float = 1.0
    compute: float = 1.0

    @staticmethod
    def of(machine: MachineProfile, read: Resource, compute: Resource) -> Contention:
        """The measured pair of a machine; 1 where none was measured."""
        for entry in machine.contention:
            if entry.first in ACTIVITY_NAMES[read] and entry.second in ACTIVITY_NAMES[compute]:
                return Contention.clamped(entry.first_slowdown, entry.second_slowdown)
            if entry.second in ACTIVITY_NAMES[read] and entry.first in ACTIVITY_NAMES[compute]:
                return Contention.clamped(entry.second_slowdown, entry.first_slowdown)
        return Contention()

    @staticmethod
    def clamped(read: float, compute: float) -> Contention:
        """A measured pair, scaled to what the class promises."""
        read, compute = max(1.0, read), max(1.0, compute)
        scale = min(1.0, 1 / read + 1 / compute)
        return Contention(read * scale, compute * scale)

    def stretched(self, read_s: float, compute_s: float) -> tuple[float, float]:
        """Seconds that reading and computing take when as much as possible of both runs at once.

        With D, C alone and slowdowns d, c: the one that is over first, D·d or C·c, is slowed all along, the other while it lasts:
        D·d >= C·c: (D + C·c·(1 − 1/d), C·c), else (D·d, C + D·d·(1 − 1/c)).
        """
        slow_read, slow_compute = read_s * self.read, compute_s * self.compute
        if slow_read >= slow_compute:
            return read_s + slow_compute * (1 - 1 / self.read), slow_compute
        return slow_read, compute_s + slow_read * (1 - 1 / self.compute)


class LinearCosts:
    """Seconds of linear layers with one number of threads."""

    def __init__(self, curves: Sequence[LinearCurve], threads: int) -> None:
        self._curves: dict[tuple[str, str], list[LinearCurve]] = {}
        for curve in curves:
            if curve.threads == threads:
                self._curves.setdefault((curve.kernel, curve.format), []).append(curve)
        self._tables: dict[tuple[str, str, int, int], Array] = {}
        largest = max((int(curve.flops_per_s.x[-1]) for curve in curves), default=1)
        self._grid: Array = np.arange(1, largest + 1, dtype=np.float64)

    def kernels(self, format_name: str) -> tuple[str, ...]:
        """Kernels measured for a stored format."""
        return tuple(dict.fromkeys(kernel for kernel, fmt in self._curves if fmt == format_name))

    def kernel_for(self, kernel: str, format_name: str) -> str:
        """What of a planned `kernel` is for this format (`plan.kernel_for`), or where that was not measured the kernel that takes every
        format, or the first that was measured."""
        for name in (kernel_for(kernel, format_name), ANY_FORMAT_KERNEL):
            if (name, format_name) in self._curves:
                return name
        return self.kernels(format_name)[0]

    def rate(self, kernel: str, format_name: str, n: int, k: int, tokens: Array) -> Array:
        """FLOP/s of a layer [N, K]: the curve of that shape, or between the curves of the nearest weight counts, log-log."""
        curves = self._curves[self.kernel_for(kernel, format_name), format_name]
        exact = [curve for curve in curves if (curve.n, curve.k) == (n, k)]
        by_count: dict[int, Array] = {}
        for curve in exact or curves:
            rates, count = rate_at(curve.flops_per_s, tokens), curve.n * curve.k
            by_count[count] = np.minimum(by_count[count], rates) if count in by_count else rates
        counts = sorted(by_count)
        at = float(np.clip(n * k, counts[0], counts[-1]))
        above = next(count for count in counts if count >= at)
        below = max(count for count in counts if count <= at)
        if above == below:
            return by_count[above]
        share = (np.log(at) - np.log(below)) / (np.log(above) - np.log(below))
        return np.asarray(by_count[below] ** (1 - share) * by_count[above] ** share)

    def seconds(self, kernel: str, format_name: str, n: int, k: int, tokens: Array) -> Array:
        """Seconds of a linear layer [N, K] over `tokens` rows: 2·M·N·K / rate, read from a table over M."""
        key = (self.kernel_for(kernel, format_name), format_name, n, k)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = 2.0 * n * k * self._grid / self.rate(*key, self._grid)
        index = np.minimum(np.ceil(tokens), len(table)).astype(np.int64) - 1
        return np.asarray(table[index] * np.maximum(1.0, tokens / self._grid[-1]))


class DiskCosts:
    """Prices of reading from and writing to a disk with at most `io_threads` requests in flight."""

    def __init__(self, disk: Disk, io_threads: int) -> None:
        self.io_threads = io_threads
        self._read = {curve.threads: curve.bytes_per_s for curve in disk.read if curve.threads <= io_threads}
        self._write_s = disk.random_write_s or 0.0
        self._written = [rate for curve in disk.write for rate in curve.bytes_per_s.y]

    def write_seconds(self, num_bytes: int, num_writes: int = 1) -> float:
        """Seconds to write in place, one write after another: at the best rate that was measured, or that of reading where none was, and
        what a small write takes for each."""
        return num_bytes / max(self._written, default=self.best_rate(READ_REQUEST_BYTES)) + num_writes * self._write_s

    def read_seconds(self, num_bytes: int, num_requests: int) -> float:
        """Seconds to read a unit's `num_bytes` from disk in `num_requests` requests of about equal size: bytes / rate(size, in flight),
        and the latency of a single request for the emptying of the queue at the unit's end."""
        if num_bytes == 0:
            return 0.0
        threads = max((count for count in self._read if count <= num_requests), default=min(self._read))
        curve = self._read[threads]
        latency = self._read[min(self._read)].fit
        rate = float(rate_at(curve, num_bytes / num_requests))
        return num_bytes / rate + (latency.latency_s if latency is not None else 0.0)

    def best_rate(self, largest_bytes: float) -> float:
        """Bytes per second that no read of a unit of at most `largest_bytes` exceeds."""
        size = min(max(largest_bytes, 1.0), READ_REQUEST_BYTES)
        curves = self._read.values()
        within = [rate for c in curves for at, rate in zip(c.x, c.y, strict=True) if at <= size]
        return max([*within, *(float(rate_at(curve, size)) for curve in curves)])

    def least_s_per_byte(self, largest_piece: float, largest_unit: float) -> float:
        """Seconds per byte that no read of a unit of so many bytes goes below: at the best rate, each piece by itself, until the queue is
        empty."""
        fit = self._read[min(self._read)].fit
        return 1 / self.best_rate(largest_piece) + (fit.latency_s / largest_unit if fit is not None else 0.0)


@dataclass(frozen=True)
class Product:
    """A linear layer [N, K], or one of whose `num_experts` matrices, each in `parts` of that size, a token meets `per_token`."""

    format: str
    n: int
    k: int
    num_experts: int = 1
    per_token: int = 1
    parts: int = 1

    @staticmethod
    def of(model: ModelShape, tensor: TensorShape) -> Product:
        """The product of a matrix or of a layer's experts."""
        rows, columns = counting.matrix_size(tensor)
        experts = tensor.num_experts
        parts = max(1, tensor.num_runs // experts)
        return Product(tensor.format, rows // experts // parts, columns, experts, counting.experts_met(model, tensor), parts)

    def calls_and_rows(self, tokens: Array) -> tuple[Array, Array]:
        """Matrices that `tokens` tokens are multiplied with, and the rows that each meets: as expected where they are experts."""
        if self.num_experts == 1:
            return np.ones_like(tokens), tokens
        calls = counting.experts_hit(self.num_experts, self.per_token, tokens)
        return self.parts * calls, np.ceil(self.per_token * tokens / calls)


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers that cost the same."""

    shape: LayerShape
    products: tuple[Product, ...]
    """Of each linear layer."""
    elementwise_bytes: int
    """Per token."""
    few_tokens: int
    """So many are computed without Python."""

    @staticmethod
    def of(model: ModelShape, layer: int) -> LayerKind:
        """The kind of one layer of a model."""
        products = tuple(Product.of(model, tensor) for tensor in counting.layer_matrices(model, layer))
        return LayerKind(model.layers[layer], products, counting.elementwise_bytes(model, layer, 1), counting.few_tokens(model))


class MachineCosts:
    """Prices of a machine whose compute tier is the host, with a disk behind it, at one number of compute threads."""

    def __init__(self, machine: MachineProfile, disk: DiskCosts, compute_threads: int) -> None:
        self.machine, self.disk = machine, disk
        self.compute_threads = compute_threads
        self.linear = LinearCosts(machine.linear, compute_threads)
        self.contention = Contention.of(machine, "disk_read", "host_compute")
        self._attention_curve = cache(lambda phase, kv_format: attention_curve(machine, phase, kv_format, compute_threads).rate)
        self._quantize_per_s = {
            rate.format: rate.per_s for rate in machine.rates if (rate.work, rate.tier, rate.way) == ("quantize", "host", "fused")
        }
        """Elements of keys and values per second, by format."""

    def layer_seconds(self, kind: LayerKind, kernel: str, tokens: Array) -> Array:
        """Seconds of one decoder layer over micro-batches of `tokens` tokens, attention left out:
        linear layers + their hand-over to the pool + fixed cost of a layer + elementwise bytes / rate."""
        return np.asarray(sum(self.linear_seconds(kind, kernel, tokens)) + self.rest_seconds(kind, tokens))

    def linear_seconds(self, kind: LayerKind, kernel: str, tokens: Array) -> list[Array]:
        """Seconds of each linear layer of a decoder layer, its hand-over to the pool included."""
        call = self.machine.overheads.call_s(self.compute_threads)
        seconds = []
        for product in kind.products:
            calls, rows = product.calls_and_rows(np.asarray(tokens, dtype=np.float64))
            seconds.append(calls * (call + self.linear.seconds(kernel, product.format, product.n, product.k, rows)))
        return seconds

    def rest_seconds(self, kind: LayerKind, tokens: Array, *, cut: bool = False) -> Array:
        """Seconds of a decoder layer, `cut` at its matrices or whole, outside its linear layers and its attention."""
        overheads = self.machine.overheads
        by_python = np.where((tokens > kind.few_tokens) | cut, overheads.python_layer_s, 0.0)
        return np.asarray(overheads.layer_s + by_python + overheads.elementwise_s(kind.elementwise_bytes * tokens))

    def head_seconds(self, model: ModelShape, kernel: str, rows: Array) -> Array:
        """Seconds of the output head over one token of each of `rows` sequences, its hand-over to the pool left out."""
        return self.linear.seconds(kernel, model.head.format, *counting.matrix_size(model.head), rows)

    def prefill_attention_seconds(self, shape: LayerShape, lengths: Sequence[int], kv_format: str = "fp32") -> Array:
        """Seconds of one layer's attention over each prompt, and of quantizing its keys and values."""
        flops = np.array([counting.prefill_attention_flops(shape, length) for length in lengths])
        kept = np.array([counting.kv_tokens(shape, length) for length in lengths], dtype=np.float64)
        seconds = flops / rate_at(self._attention_curve("prefill", "fp32"), np.asarray(lengths, dtype=np.float64))
        return np.asarray(seconds + self._quantize_seconds(shape, kept, kv_format))

    def decode_attention_seconds(self, shape: LayerShape, contexts: Sequence[int], kv_format: str = "fp32") -> Array:
        """Seconds of one layer's attention over each sequence, `contexts` tokens long with the newest: its keys and values read once and
        dequantized as they are, the newest token's quantized."""
        read = np.array([counting.decode_attention_bytes(shape, context, kv_format, kv_format) for context in contexts], dtype=np.float64)
        kept = np.array([counting.kv_tokens(shape, context) for context in contexts], dtype=np.float64)
        seconds = read / rate_at(self._attention_curve("decode", kv_format), kept)
        return np.asarray(seconds + self._quantize_seconds(shape, np.ones(len(kept)), kv_format))

    def _quantize_seconds(self, shape: LayerShape, tokens: Array, kv_format: str) -> Array:
        elements = shape.num_kv_heads * (shape.key_dim + shape.value_dim) * tokens
        return np.asarray(elements / self._quantize_per_s.get(kv_format, float("inf")))

    def lookup_seconds(self, model: ModelShape, on_disk: bool) -> float:
        """Seconds of one token's embedding: a random read of its row where the table is on disk, several in flight, else part of the
        fixed costs. Tokens that a micro-batch repeats are read once; none is assumed to."""
        if not on_disk:
            return 0.0
        latency = self.machine.overheads.random_read_s / self.disk.io_threads
        return latency + counting.row_bytes(model.embedding) / self.disk.best_rate(READ_REQUEST_BYTES)


def num_requests(piece_bytes: Sequence[int]) -> int:
    """Requests in which pieces are read."""
    return sum(-(-size // READ_REQUEST_BYTES) for size in piece_bytes)


def attention_curve(machine: MachineProfile, phase: str, kv_format: str, threads: int) -> AttentionCurve:
    """The curve of the largest number of threads within `threads`, or of the smallest measured."""
    curves: list[AttentionCurve] = [curve for curve in machine.attention if (curve.phase, curve.format) == (phase, kv_format)]
    if not curves:
        what = f"{phase} attention over {kv_format} keys and values"
        raise StatedError(f"The machine profile {machine.name!r} has no {what} measured; run `lmoffload profile` again.")
    within = [curve for curve in curves if curve.threads <= threads]
    return max(within, key=lambda c: c.threads) if within else min(curves, key=lambda c: c.threads)
