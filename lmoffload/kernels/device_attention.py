"""Attention on a torch device: `scaled_dot_product_attention` over prompts, and over stored keys and values in decode.

A soft cap or a sink, which that function does not know, takes plain operators in fp32. References: `attention` and `decode_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lmoffload.kernels.attention import NO_WINDOW, softcapped, weights_of
from lmoffload.kernels.decode_attention import reference_decode_attention
from lmoffload.kernels.kv_rows import KVRows, Numbers, PlainRows
from lmoffload.kernels.triton_ready import triton_runs_on


def device_prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    *,
    known: int = 0,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `attention.prefill_attention`; tensors of any floating dtype, the result of q's."""
    heads, value_dim = q.shape[1], v.shape[2]
    out = q.new_zeros(q.shape[0], heads, value_dim)
    for first, count, size in _alike(segments):
        end = first + count * size
        asked = slice(first, end - known)
        query, key, value = (_by_segment(t, count) for t in (q[asked], k[first:end], v[first:end]))
        out[asked] = _causal(query, key, value, known, scaling, window, softcap, sinks).transpose(1, 2).reshape(-1, heads, value_dim)
    return out


def _by_segment(t: torch.Tensor, count: int) -> torch.Tensor:
    """[B · S, H, D] -> [B, H, S, D]."""
    return t.reshape(count, -1, *t.shape[1:]).transpose(1, 2)


def _alike(segments: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first token, segments, tokens of each) of neighbours of one size."""
    for _, some in groupby(enumerate(segments), key=lambda one: (one[1][1] - one[1][0], one[1][0] - one[0] * (one[1][1] - one[1][0]))):
        run = [segment for _, segment in some]
        if run[0][1] > run[0][0]:
            yield run[0][0], len(run), run[0][1] - run[0][0]


def _causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    known: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [B, H, S, D] of the last S tokens, k [B, KV, known + S, D], v [B, KV, known + S, Dv] -> [B, H, S, Dv]."""
    size = k.shape[2]
    plain = known == 0 and (window is None or size <= window)
    if plain and softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    place = torch.arange(size, device=q.device)
    distance = place[known:, None] - place[None, :]
    allowed = (distance >= 0) & (distance < (size if window is None else window))
    grouped = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])  # [B, KV, G, S, D]
    return _attend(grouped, k[:, :, None], v[:, :, None], allowed, scaling, softcap, sinks).flatten(1, 2)


def device_decode_attention(
    q: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    rows: Numbers,
    lengths: Numbers,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `decode_attention.decode_attention`; q of any floating dtype, the result of the same."""
    options: dict[str, Any] = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": None if sinks is None else sinks.float()}
    if not (isinstance(keys, PlainRows) and isinstance(values, PlainRows)):
        if triton_runs_on(q.device):
            from lmoffload.kernels.triton_decode import quantized_decode_attention

            return quantized_decode_attention(q, keys, values, rows, lengths, **options)
        return reference_decode_attention(q.float(), keys, values, rows, lengths, **options).to(q.dtype)
    rooms, most = values.rooms[rows], int(lengths.max())
    k, v = (_laid_out(stored, rows, min(most, int(rooms.max()))).to(q.dtype) for stored in (keys, values))
    allowed = _kept(rooms, lengths, window, k.shape[2]).to(q.device)
    # The heads that share a key are queries of its one head: nothing is repeated.
    grouped = q.view(q.shape[0], keys.heads, -1, q.shape[2])
    if sinks is None:
        return _attend(grouped, k, v, allowed[:, None, None], scaling, softcap, None).reshape(q.shape[0], q.shape[1], -1)
    out = _attend(grouped[:, :, :, None], k[:, :, None], v[:, :, None], allowed[:, None, None, None], scaling, softcap, sinks)
    return out.reshape(q.shape[0], q.shape[1], -1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention where a mask allows it. With sinks, q is [B, KV, G, S, D] and k and v have a dimension of one head for G."""
    if softcap is None and sinks is None:
        if q.dim() == 5:  # torch's fused kernels take four dimensions
            key, value = (t.expand(-1, -1, q.shape[2], -1, -1).flatten(1, 2) for t in (k, v))
            out = functional.scaled_dot_product_attention(q.flatten(1, 2), key, value, attn_mask=allowed, scale=scaling)
            return out.view(*q.shape[:-1], v.shape[-1])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling)
    scores = softcapped(q.float() @ k.float().transpose(-1, -2) * scaling, softcap).masked_fill(~allowed, float("-inf"))
    if sinks is None:
        return (functional.softmax(scores, dim=-1) @ v.float()).to(q.dtype)
    by_head = torch.stack([weights_of(one, sinks.float()) for one in scores])
    return (by_head @ v.float()).to(q.dtype)


def _laid_out(stored: PlainRows, rows: Numbers, places: int) -> torch.Tensor:
    """[R, heads, places, dim] of the first places of each row: a view where rows lie side by side and have one room, else a copy."""
    lines, firsts, rooms = stored.lines, stored.first_lines(rows), stored.rooms[rows]
    stride = stored.heads * int(rooms[0])
    if (rooms == rooms[0]).all() and (np.diff(firsts) == stride).all():
        begin = int(firsts[0])
        return lines[begin : begin + len(rows) * stride].view(len(rows), stored.heads, -1, stored.dim)[:, :, :places]
    place = np.minimum(np.arange(places), rooms[:, None] - 1)
    index = firsts[:, None, None] + np.arange(stored.heads)[None, :, None] * rooms[:, None, None] + place[:, None, :]
    return lines[torch.from_numpy(index).to(lines.device)]


def _kept(rooms: Numbers, lengths: Numbers, window: int | None, places: int) -> torch.Tensor:
    """bool [R, places]: whether what lies at a place of a row's ring is attended to."""
    place, newest = np.arange(places)[None, :], lengths[:, None] - 1
    position = newest - (newest - place) % rooms[:, None]
    kept = np.minimum(lengths, np.minimum(rooms, NO_WINDOW if window is None else window))
    return torch.from_numpy((place < rooms[:, None]) & (position >= lengths[:, None] - kept[:, None]))
