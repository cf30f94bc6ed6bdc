"""Attention of one layer: prefill over fp32, decode over every format of keys and values, against the length, per number of threads; and
how fast keys and values are quantized."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmoffload.profiler.curves import curve_of
from lmoffload.profiler.limits import usable_memory
from lmoffload.profiler.memory import rotation_bytes
from lmoffload.profiler.samples import repeat
from lmoffload_solver import counting
from lmoffload_solver.accelerator import Rate
from lmoffload_solver.formats import KV_FORMATS, KV_LINE_BYTES, LINE_ELEMENTS, PARAMETER_BYTES
from lmoffload_solver.machine import AttentionCurve
from lmoffload_solver.model import LayerShape

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.kv_rows import KVRows, Numbers
    from lmoffload.kernels.pool import Pool

LAYER = LayerShape(num_heads=16, num_kv_heads=4, key_dim=64, value_dim=64)
"""Four query heads for each key and value head: between models without grouping and those with eight."""
SCALING = LAYER.key_dim**-0.5
DECODE_ROWS = 16
CONTEXTS = (16, 64, 256, 1024, 4096)
PROMPTS = (16, 64, 256, 1024, 2048)
QUICK_CONTEXTS = (16, 64, 256, 1024)
QUICK_PROMPTS = (16, 64, 256, 512)
QUICK_COMPRESSED_CONTEXTS = (64, 1024)
MEMORY_SHARE = 4
FILL = 50
"""A byte that makes normal numbers in every format."""

QUANTIZED_LINES = 1 << 15


def compile_attention() -> None:
    """What would otherwise be compiled while it is measured."""
    from lmoffload.kernels.attention import prefill_kernel
    from lmoffload.kernels.decode_attention import decode_kernel

    prefill_kernel()
    for format_name in KV_FORMATS:
        decode_kernel(format_name, format_name)


def attention_curves(
    pools: Sequence[Pool], budget_s: float, *, quick: bool, tell: Callable[[str], None] = lambda what: None
) -> tuple[AttentionCurve, ...]:
    """A curve for each phase and pool."""
    contexts, prompts = (QUICK_CONTEXTS, QUICK_PROMPTS) if quick else (CONTEXTS, PROMPTS)
    compressed = QUICK_COMPRESSED_CONTEXTS if quick else contexts
    points = len(contexts) + len(prompts) + len(compressed) * (len(KV_FORMATS) - 1)
    share_s = budget_s / len(pools) / points
    found = []
    for pool in pools:
        tell(f"attention, {pool.threads} threads")
        for format_name in KV_FORMATS:
            found.append(_decode_curve(pool, format_name, contexts if format_name == "fp32" else compressed, share_s))
        found.append(_prefill_curve(pool, prompts, share_s))
    return tuple(found)


def _decode_curve(pool: Pool, format_name: str, contexts: Sequence[int], budget_s: float) -> AttentionCurve:
    """KV bytes per second; the layers' caches lie one after another in memory and are read in turn, as in a decode step."""
    import numpy as np
    import torch

    q = torch.randn(DECODE_ROWS, LAYER.num_heads, LAYER.key_dim, generator=torch.Generator().manual_seed(0))
    allowed = min(rotation_bytes()[0], usable_memory() // MEMORY_SHARE)
    sizes = {context: DECODE_ROWS * counting.layer_kv_bytes(LAYER, context, format_name, format_name) for context in contexts}
    fitting = [context for context in contexts if sizes[context] <= allowed] or [contexts[0]]
    memory = torch.full((max(allowed, sizes[fitting[-1]]),), FILL, dtype=torch.uint8)
    samples = []
    for context in fitting:
        layers = itertools.cycle(_layers(memory, format_name, context))
        lengths = np.full(DECODE_ROWS, context)
        samples.append(repeat(partial(_decode, q, layers, lengths, pool), budget_s))
    amounts = [float(DECODE_ROWS * counting.decode_attention_bytes(LAYER, context, format_name, format_name)) for context in fitting]
    return AttentionCurve(phase="decode", format=format_name, threads=pool.threads, rate=curve_of(fitting, amounts, samples))


def _layers(memory: torch.Tensor, format_name: str, context: int) -> list[tuple[KVRows, KVRows]]:
    """Keys and values of one layer after another, all in `memory`."""
    import numpy as np

    from lmoffload.kernels.kv_rows import keys_of, values_of

    heads, dim = LAYER.num_kv_heads, LAYER.key_dim
    room = counting.key_room(LAYER, context, format_name)
    key_bytes = heads * counting.key_head_bytes(dim, room, format_name)
    value_bytes = heads * context * counting.value_token_bytes(dim, format_name)
    rows, size = np.arange(DECODE_ROWS), DECODE_ROWS * (key_bytes + value_bytes)
    found = []
    for first in range(0, memory.numel() - size + 1, size):
        middle = first + DECODE_ROWS * key_bytes
        keys, values = memory[first:middle], memory[middle : first + size]
        found.append((
            keys_of(format_name, heads, dim, keys, rows * key_bytes, np.full(DECODE_ROWS, room)),
            values_of(format_name, heads, dim, values, rows * value_bytes, np.full(DECODE_ROWS, context)),
        ))  # fmt: skip
    return found


def _decode(q: torch.Tensor, layers: Any, lengths: Numbers, pool: Pool) -> None:
    import numpy as np

    from lmoffload.kernels.decode_attention import decode_attention

    keys, values = next(layers)
    decode_attention(q, keys, values, np.arange(DECODE_ROWS), lengths, scaling=SCALING, pool=pool)


def quantize_rates(pool: Pool, budget_s: float) -> tuple[Rate, ...]:
    """Numbers a second that are turned into each quantized format of keys and values, in whole prompts."""
    import torch

    from lmoffload.kernels.codec import encode_lines

    x = torch.randn(QUANTIZED_LINES, LINE_ELEMENTS, generator=torch.Generator().manual_seed(0))
    places, found = torch.arange(QUANTIZED_LINES), []
    for format_name, line_bytes in KV_LINE_BYTES.items():
        target = torch.empty(QUANTIZED_LINES * (line_bytes + PARAMETER_BYTES), dtype=torch.uint8)
        where = places * line_bytes, QUANTIZED_LINES * line_bytes + places * PARAMETER_BYTES
        sample = repeat(partial(encode_lines, x, format_name, target, *where, pool), budget_s / len(KV_LINE_BYTES))
        found.append(Rate(work="quantize", tier="host", way="fused", per_s=x.numel() / sample.median_s, format=format_name))
    return tuple(found)


def _prefill_curve(pool: Pool, prompts: Sequence[int], budget_s: float) -> AttentionCurve:
    """FLOP/s of causal attention over a micro-batch of prompts of one length."""
    import torch

    from lmoffload.kernels.attention import prefill_attention

    generator = torch.Generator().manual_seed(0)
    samples, amounts = [], []
    for length in prompts:
        count = max(1, prompts[-1] // length // 4)
        tokens = count * length
        q = torch.randn(tokens, LAYER.num_heads, LAYER.key_dim, generator=generator)
        k, v = (torch.randn(tokens, LAYER.num_kv_heads, LAYER.key_dim, generator=generator) for _ in range(2))
        segments = [(i * length, (i + 1) * length) for i in range(count)]
        samples.append(repeat(partial(prefill_attention, q, k, v, segments, scaling=SCALING, pool=pool), budget_s))
        amounts.append(count * counting.prefill_attention_flops(LAYER, length))
    return AttentionCurve(phase="prefill", format="fp32", threads=pool.threads, rate=curve_of(prompts, amounts, samples))
