"""Attention of one layer over fp32 keys and values: prefill and decode, against the length, per number of threads."""

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
from lmoffload_solver.machine import AttentionCurve
from lmoffload_solver.model import LayerShape

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.pool import Pool

LAYER = LayerShape(num_heads=16, num_kv_heads=4, key_dim=64, value_dim=64)
"""Four query heads for each key and value head: between models without grouping and those with eight."""
SCALING = LAYER.key_dim**-0.5
DECODE_ROWS = 16
CONTEXTS = (16, 64, 256, 1024, 4096)
PROMPTS = (16, 64, 256, 1024, 2048)
QUICK_CONTEXTS = (16, 64, 256, 1024)
QUICK_PROMPTS = (16, 64, 256, 512)
MEMORY_SHARE = 4


def attention_curves(
    pools: Sequence[Pool], budget_s: float, *, quick: bool, tell: Callable[[str], None] = lambda what: None
) -> tuple[AttentionCurve, ...]:
    """A curve for each phase and pool."""
    contexts, prompts = (QUICK_CONTEXTS, QUICK_PROMPTS) if quick else (CONTEXTS, PROMPTS)
    share_s = budget_s / len(pools) / (len(contexts) + len(prompts))
    found = []
    for pool in pools:
        tell(f"attention, {pool.threads} threads")
        found.append(_decode_curve(pool, contexts, share_s))
        found.append(_prefill_curve(pool, prompts, share_s))
    return tuple(found)


def _decode_curve(pool: Pool, contexts: Sequence[int], budget_s: float) -> AttentionCurve:
    """KV bytes per second; the layers' caches lie one after another in memory and are read in turn, as in a decode step."""
    import torch

    generator = torch.Generator().manual_seed(0)
    width = LAYER.num_kv_heads * LAYER.key_dim
    row_bytes = counting.kv_bytes_per_token(LAYER) * DECODE_ROWS
    allowed = min(rotation_bytes()[0], usable_memory() // MEMORY_SHARE)
    fitting = [context for context in contexts if context * row_bytes <= allowed] or [contexts[0]]
    kv = torch.randn(max(allowed, fitting[-1] * row_bytes) // 4, generator=generator)
    q = torch.randn(DECODE_ROWS, LAYER.num_heads, LAYER.key_dim, generator=generator)
    samples = []
    for context in fitting:
        block = DECODE_ROWS * context * width
        layers = itertools.cycle([_rows(first, context * width) for first in range(0, kv.numel() - block + 1, block)])
        lengths = torch.full((DECODE_ROWS,), context)
        samples.append(repeat(partial(_decode, q, kv, layers, lengths, pool), budget_s))
    amounts = [float(DECODE_ROWS * counting.decode_attention_bytes(LAYER, context)) for context in fitting]
    return AttentionCurve(phase="decode", format="fp32", threads=pool.threads, rate=curve_of(fitting, amounts, samples))


def _rows(first: int, row_elements: int) -> torch.Tensor:
    import torch

    return torch.arange(DECODE_ROWS) * row_elements + first


def _decode(q: torch.Tensor, kv: torch.Tensor, layers: Any, lengths: torch.Tensor, pool: Pool) -> None:
    """Keys and values are each half of the bytes and may be the same memory: two halves of a layer's block twice the size."""
    from lmoffload.kernels.attention import decode_attention

    key_starts, value_starts = next(layers), next(layers)
    decode_attention(
        q, kv, kv, key_starts, value_starts, lengths, lengths,
        num_kv_heads=LAYER.num_kv_heads, value_dim=LAYER.value_dim, scaling=SCALING, pool=pool,
    )  # fmt: skip


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
