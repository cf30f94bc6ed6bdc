"""Triton kernel: decode attention over quantized keys and values as they lie in `kv_rows`.

Not yet run on a GPU; tested in Triton's interpreter against `decode_attention.reference_decode_attention`.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from lmoffload.kernels.attention import NO_WINDOW
from lmoffload.kernels.codec import CODECS
from lmoffload.kernels.kv_rows import NEWEST, GroupedKeys, KVRows, Numbers, PanelValues

SHARING = 16
"""Query heads of a program, at least: a tensor core's product takes no fewer."""


@triton.jit  # type: ignore[untyped-decorator]
def _widened(codes, parameter, FOUR: tl.constexpr, number):  # type: ignore[no-untyped-def]
    """scale * (code + zero); `number`: place of each code in its line of 32."""
    scale = (parameter << 16).to(tl.float32, bitcast=True)
    if FOUR:
        code = (codes.to(tl.int32) >> (number // 16 * 4)) & 15
    else:
        code = codes.to(tl.int8, bitcast=True).to(tl.int32)
    return scale * (code + (parameter >> 16)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    q, keys, key_words, key_halves, values, value_words, tables, sinks, out, num_rows, window, scaling, softcap,
    KV: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr,
    VALUE_WIDE: tl.constexpr, FOUR_K: tl.constexpr, FOUR_V: tl.constexpr, CAPPED: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One row and one key head. tables: int64 [5, R]: starts of keys and values (bytes), rooms of both, lengths."""
    row, head = tl.program_id(0), tl.program_id(1)
    key_start, value_start = tl.load(tables + row), tl.load(tables + num_rows + row)
    key_room, value_room = tl.load(tables + 2 * num_rows + row), tl.load(tables + 3 * num_rows + row)
    length = tl.load(tables + 4 * num_rows + row)
    first = length - tl.minimum(length, tl.minimum(value_room, window))
    line_k: tl.constexpr = 16 if FOUR_K else 32
    line_v: tl.constexpr = 16 if FOUR_V else 32
    group_bytes: tl.constexpr = DIM * (line_k + 4)
    panels: tl.constexpr = (VALUE + 31) // 32
    head_start = key_start + head * (key_room * group_bytes + 32 * DIM * 2)

    shared, channel, lane = tl.arange(0, SHARED), tl.arange(0, WIDE), tl.arange(0, 32)
    value_channel = tl.arange(0, VALUE_WIDE)
    heads = head * GROUP + shared
    mine, real, value_real = shared < GROUP, channel < DIM, value_channel < VALUE
    place = (row * KV * GROUP + heads)[:, None] * DIM + channel[None, :]
    query = tl.load(q + place, mask=mine[:, None] & real[None, :], other=0.0).to(tl.float32)
    if SINK:
        most = tl.load(sinks + heads, mask=mine, other=0.0).to(tl.float32)
        total = tl.full((SHARED,), 1.0, tl.float32)
    else:
        most = tl.full((SHARED,), -1e30, tl.float32)
        total = tl.zeros((SHARED,), tl.float32)
    found = tl.zeros((SHARED, VALUE_WIDE), tl.float32)
    panel_start = value_start + (head * panels + value_channel // 32) * value_room * (line_v + 4)
    number_v = value_channel % 32

    for group in range(first // 32, (length + 31) // 32):
        token = group * 32 + lane
        live = (token >= first) & (token < length)
        if (group + 1) * 32 <= length:
            begin = head_start + group % key_room * group_bytes
            codes = tl.load(keys + begin + channel[:, None] * line_k + (lane % line_k)[None, :], mask=real[:, None], other=0)
            parameter = tl.load(key_words + (begin + DIM * line_k) // 4 + channel, mask=real, other=0)
            key = _widened(codes, parameter[:, None], FOUR_K, lane[None, :])
        else:
            newest = (head_start + key_room * group_bytes) // 2
            inside = real[:, None] & live[None, :]
            key = tl.load(key_halves + newest + lane[None, :] * DIM + channel[:, None], mask=inside, other=0.0).to(tl.float32)
        score = tl.dot(query, key, input_precision="ieee") * scaling
        if CAPPED:
            score = (2 * tl.sigmoid(2 * score / softcap) - 1) * softcap
        score = tl.where(live[None, :], score, -1e30)
        larger = tl.maximum(most, tl.max(score, axis=1))
        weight = tl.where(live[None, :], tl.exp(score - larger[:, None]), 0.0)
        shrunk = tl.exp(most - larger)
        spot = token % value_room
        inside = live[:, None] & value_real[None, :]
        code_place = panel_start[None, :] + spot[:, None] * line_v + (number_v % line_v)[None, :]
        codes = tl.load(values + code_place, mask=inside, other=0)
        parameter = tl.load(value_words + (panel_start[None, :] + value_room * line_v) // 4 + spot[:, None], mask=inside, other=0)
        value = _widened(codes, parameter, FOUR_V, number_v[None, :])
        found = found * shrunk[:, None] + tl.dot(weight, value, input_precision="ieee")
        total, most = total * shrunk + tl.sum(weight, axis=1), larger
    place = (row * KV * GROUP + heads)[:, None] * VALUE + value_channel[None, :]
    tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask=mine[:, None] & value_real[None, :])


def quantized_decode_attention(
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
    """See `decode_attention.decode_attention`; q [R, H, D] of any floating dtype, the result [R, H, Dv] of the same."""
    assert isinstance(keys, GroupedKeys) and isinstance(values, PanelValues), "keys and values are both quantized"
    num_rows, heads, dim = q.shape
    tables = np.stack([keys.starts[rows], values.starts[rows], keys.rooms[rows], values.rooms[rows], lengths])
    out = torch.empty(num_rows, heads, values.dim, dtype=q.dtype, device=q.device)
    group = heads // keys.heads
    _decode[(num_rows, keys.heads)](
        q.contiguous(), keys.data, keys.data.view(torch.int32), keys.data.view(NEWEST), values.data, values.data.view(torch.int32),
        torch.from_numpy(tables).to(q.device), q if sinks is None else sinks, out, num_rows, NO_WINDOW if window is None else window,
        scaling, softcap or 0.0,
        KV=keys.heads, GROUP=group, SHARED=max(SHARING, triton.next_power_of_2(group)), DIM=dim,
        WIDE=max(16, triton.next_power_of_2(dim)), VALUE=values.dim, VALUE_WIDE=max(16, triton.next_power_of_2(values.dim)),
        FOUR_K=CODECS[keys.format].line_bytes == 16, FOUR_V=CODECS[values.format].line_bytes == 16,
        CAPPED=softcap is not None, SINK=sinks is not None,
    )  # fmt: skip
    return out
