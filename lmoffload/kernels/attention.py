"""Attention over packed sequences: one query a row in decode, whole prompts in prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from lmoffload.kernels.pool import Pool

BLOCK = 64


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_starts: torch.Tensor,
    value_starts: torch.Tensor,
    capacities: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_kv_heads: int,
    value_dim: int | None = None,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    pool: Pool,
) -> torch.Tensor:
    """Attention of one new token a row over that row's keys and values. See docs/kernels.md."""
    return reference_decode_attention(
        q, keys, values, key_starts, value_starts, capacities, lengths,
        num_kv_heads=num_kv_heads, value_dim=value_dim, scaling=scaling, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def reference_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_starts: torch.Tensor,
    value_starts: torch.Tensor,
    capacities: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_kv_heads: int,
    value_dim: int | None = None,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, row by row."""
    rows, heads, dim = q.shape
    value_dim = dim if value_dim is None else value_dim
    out = q.new_empty(rows, heads, value_dim)
    for r in range(rows):
        capacity, end = int(capacities[r]), int(lengths[r])
        first = 0 if window is None else max(0, end - window)
        k = keys[int(key_starts[r]) :][: num_kv_heads * capacity * dim].view(num_kv_heads, capacity, dim)[:, first:end]
        v = values[int(value_starts[r]) :][: num_kv_heads * capacity * value_dim].view(num_kv_heads, capacity, value_dim)[:, first:end]
        grouped = q[r].view(num_kv_heads, -1, dim)
        scores = _softcapped(grouped @ k.transpose(1, 2) * scaling, softcap)
        out[r] = (_weights(scores, sinks) @ v).view(heads, value_dim)
    return out


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    pool: Pool,
) -> torch.Tensor:
    """Causal attention within each segment (first, end) of a packed sequence; tokens outside any segment give zeros."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for first, end in segments:
        out[first:end] = reference_prefill_attention(
            q[first:end], k[first:end], v[first:end], [(0, end - first)], scaling=scaling, window=window, softcap=softcap, sinks=sinks
        )
    return out


def reference_prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with whole masks, in plain torch."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    out = q.new_zeros(tokens, heads, v.shape[2])
    for first, end in segments:
        size = end - first
        place = torch.arange(size)
        distance = place[:, None] - place[None, :]
        allowed = (distance >= 0) & (distance < (size if window is None else window))
        grouped = q[first:end].view(size, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        scores = _softcapped(grouped @ k[first:end].permute(1, 2, 0)[:, None] * scaling, softcap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        out[first:end] = (_weights(scores, sinks) @ v[first:end].permute(1, 0, 2)[:, None]).reshape(heads, size, -1).transpose(0, 1)
    return out


def _softcapped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension of [kv_heads, group, ..., keys]; a sink is one more logit a head, whose weight is dropped."""
    if sinks is None:
        return functional.softmax(scores, dim=-1)
    extra = sinks.view(*scores.shape[:2], *[1] * (scores.dim() - 2)).expand(*scores.shape[:-1], 1)
    return functional.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
