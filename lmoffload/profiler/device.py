"""What a torch device does a second: memory, launches, products, attention, quantizing and dequantizing, with the device's own kernels.

Written for an accelerator and not yet run on one; every measurement also runs on torch's CPU, which tests do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmoffload.profiler.samples import Sample, repeat, summarize, timed
from lmoffload.profiler.weights import random_blocks
from lmoffload_solver import counting
from lmoffload_solver.accelerator import Accelerator, Rate, RateCurve
from lmoffload_solver.formats import KV_LINE_BYTES, LINE_ELEMENTS, PARAMETER_BYTES, stored_bytes
from lmoffload_solver.machine import MemoryRate
from lmoffload_solver.model import LayerShape

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.kv_rows import KVRows
    from lmoffload.kernels.matrix import Matrix

LEAST_S = 2e-3
"""Actions are repeated to take so long before the device is waited for: the waiting itself does not count."""
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FUSED_ROWS = 64
BOUND = 1.3
"""A product that takes less than this times what reading its weights takes is bound by memory, and says nothing of FLOPs."""
QUANTIZED = "int4-g64"
LAUNCHES = 200
MEMORY_SHARE = 16
LARGEST_MATRIX_BYTES = 2 * 8192 * 8192


@dataclass(frozen=True)
class Device:
    """A torch device: how to wait for it, and what it has.

    Attributes:
        free_bytes: of its memory, now.
        reserved_bytes: of its memory, taken before anything is allocated.
    """

    torch: torch.device
    name: str
    wait: Callable[[], None]
    memory_bytes: int
    free_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class DeviceFigures:
    """What a profile has of a device."""

    accelerator: Accelerator
    memory: MemoryRate
    rates: tuple[Rate, ...]


def measure_device(device: Device, budget_s: float, tell: Callable[[str], None] = lambda what: None) -> DeviceFigures:
    """Each figure within its share of the budget."""
    each_s = budget_s / 8
    side = _side(device)
    tell("device memory")
    memory = _memory_rate(device, each_s)
    tell("device launches")
    launch_s = _launch_s(device)
    tell("device products")
    seconds = product_seconds(device, side, ROWS, 3 * each_s)
    products = rate_curve(seconds, side, memory.bytes_per_s)
    share = _fused_share(device, side, seconds[FUSED_ROWS].median_s, each_s)
    tell("device attention")
    rates = (*_attention(device, each_s), *_conversion(device, side, each_s))
    accelerator = Accelerator(
        name=device.name,
        memory_bytes=device.memory_bytes,
        reserved_bytes=device.reserved_bytes,
        memory_bytes_per_s=memory.bytes_per_s,
        launch_s=launch_s,
        products=products,
        fused_products_share=share,
    )
    return DeviceFigures(accelerator, memory, rates)


def rate_curve(seconds: dict[int, Sample], side: int, bytes_per_s: float) -> RateCurve:
    """FLOP/s of products [rows, side] x [side, side] in 16 bits, where reading weights does not bind; of the largest at least."""
    reading_s = 2 * side * side / bytes_per_s
    counted = {rows: sample for rows, sample in seconds.items() if sample.median_s > BOUND * reading_s} or dict([max(seconds.items())])
    flops = tuple(counting.linear_flops(rows, side, side) / sample.median_s for rows, sample in counted.items())
    return RateCurve(rows=tuple(float(rows) for rows in counted), flops_per_s=flops)


def product_seconds(device: Device, side: int, rows: Sequence[int], budget_s: float) -> dict[int, Sample]:
    """Of a 16-bit matrix [side, side] against each number of rows; matrices in turn, so that no cache holds them."""
    import torch

    matrices = [torch.randn(side, side, device=device.torch).to(torch.bfloat16) for _ in range(3)]
    found = {}
    for count in rows:
        x = torch.randn(count, side, device=device.torch).to(torch.bfloat16)
        actions = [partial(torch.nn.functional.linear, x, matrix) for matrix in matrices]
        sample = repeated(device, partial(_in_turn, actions), budget_s / len(rows))
        found[count] = Sample(sample.median_s / len(matrices), sample.spread, sample.count)
    return found


def repeated(device: Device, action: Callable[[], object], budget_s: float) -> Sample:
    """Seconds of one action, issued so often that waiting for the device does not count."""

    def batch(times: int) -> None:
        for _ in range(times):
            action()
        device.wait()

    batch(1)  # compiles what is compiled
    once = timed(partial(batch, 1))
    times = max(1, min(100, round(LEAST_S / once)))
    sample = repeat(partial(batch, times), max(0.0, budget_s - 2 * once))
    return Sample(sample.median_s / times, sample.spread, sample.count)


def _in_turn(actions: Sequence[Callable[[], object]]) -> None:
    for action in actions:
        action()


def _side(device: Device) -> int:
    """Of the matrices to measure with: a power of two whose 16-bit square takes no great share of the memory."""
    most = min(LARGEST_MATRIX_BYTES, device.free_bytes // MEMORY_SHARE)
    side = 256
    while 2 * (2 * side) ** 2 <= most:
        side *= 2
    return side if device.torch.type != "cpu" else 256


def _memory_rate(device: Device, budget_s: float) -> MemoryRate:
    import torch

    size = min(2**30, device.free_bytes // MEMORY_SHARE) if device.torch.type != "cpu" else 2**24
    numbers = torch.ones(size // 4, device=device.torch)
    sample = repeated(device, numbers.sum, budget_s)
    return MemoryRate(tier="device", threads=1, bytes_per_s=4 * numbers.numel() / sample.median_s, spread=sample.spread)


def _launch_s(device: Device) -> float:
    """A short kernel, its launch queued ahead."""
    import torch

    number = torch.zeros(1, device=device.torch)

    def many() -> float:
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1.0)
        device.wait()
        return (time.perf_counter() - begin) / LAUNCHES

    many()
    return summarize([many() for _ in range(5)]).median_s


def _fused_share(device: Device, side: int, plain_s: float, budget_s: float) -> float:
    """Rate of the product that dequantizes in its inner loop over that of 16-bit weights."""
    import torch

    from lmoffload.kernels.device_linear import DEQUANTIZING, device_linear

    x = torch.randn(FUSED_ROWS, side, device=device.torch).to(torch.bfloat16)
    matrix = _matrix(device, side)
    fused_s = repeated(device, lambda: device_linear(x, matrix, DEQUANTIZING), budget_s).median_s
    return min(1.0, plain_s / fused_s)


def _matrix(device: Device, side: int) -> Matrix:
    from lmoffload.kernels.matrix import Matrix

    size, pattern = stored_bytes((side, side), QUANTIZED), random_blocks(QUANTIZED)
    return Matrix(pattern.repeat(-(-size // pattern.numel()))[:size].to(device.torch), QUANTIZED, side, side)


def _attention(device: Device, budget_s: float) -> tuple[Rate, ...]:
    import numpy as np
    import torch

    from lmoffload.kernels.device_attention import device_decode_attention, device_prefill_attention
    from lmoffload.kernels.kv_rows import keys_of, values_of

    small = device.torch.type == "cpu"
    count, length, heads, dim = (2, 64, 4, 64) if small else (16, 1024, 32, 128)
    q, k, v = (torch.randn(count * length, heads, dim, device=device.torch).to(torch.bfloat16) for _ in range(3))
    segments = [(i * length, (i + 1) * length) for i in range(count)]
    prefill = repeated(device, lambda: device_prefill_attention(q, k, v, segments, scaling=0.1), budget_s / 2)
    shape = LayerShape(num_heads=heads, num_kv_heads=heads, key_dim=dim, value_dim=dim)
    flops = count * counting.prefill_attention_flops(shape, length)
    starts = np.arange(count, dtype=np.int64) * heads * length * dim * 2
    rooms = np.full(count, length, dtype=np.int64)
    stored: list[KVRows] = [
        of("bf16", heads, dim, t.view(torch.uint8).reshape(-1), starts, rooms) for of, t in ((keys_of, k), (values_of, v))
    ]
    rows, asked = np.arange(count), q[:count].contiguous()
    decode = repeated(device, lambda: device_decode_attention(asked, stored[0], stored[1], rows, rooms, scaling=0.1), budget_s / 2)
    return (
        Rate(work="attention_prefill", tier="device", way="fused", per_s=flops / prefill.median_s),
        Rate(work="attention_decode", tier="device", way="fused", per_s=2 * 2 * k.numel() / decode.median_s),
    )


def _conversion(device: Device, side: int, budget_s: float) -> tuple[Rate, ...]:
    import torch

    from lmoffload.kernels.codec import store_encoded
    from lmoffload.kernels.device_linear import device_widen

    matrix = _matrix(device, side)
    widened = repeated(device, lambda: device_widen(matrix, torch.bfloat16), budget_s / 2)
    name, lines = next(iter(KV_LINE_BYTES)), side * side // LINE_ELEMENTS // 8
    x = torch.randn(lines, LINE_ELEMENTS, device=device.torch)
    target = torch.empty(lines * (KV_LINE_BYTES[name] + PARAMETER_BYTES), dtype=torch.uint8, device=device.torch)
    places = torch.arange(lines, device=device.torch)
    codes, parameters = places * KV_LINE_BYTES[name], lines * KV_LINE_BYTES[name] + places * PARAMETER_BYTES
    encoded = repeated(device, lambda: store_encoded(x, name, target, codes, parameters), budget_s / 2)
    return (
        Rate(work="dequantize", tier="device", way="fused", per_s=side * side / widened.median_s),
        Rate(work="quantize", tier="device", way="fused", per_s=x.numel() / encoded.median_s),
    )
