"""Decode attention: one query a row over that row's stored keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir

from lmoffload.kernels.attention import JOBS_PER_THREAD, NO_WINDOW, softcapped, weights_of
from lmoffload.kernels.board import Call, emit_entry, real_word
from lmoffload.kernels.code import Compiled, host_machine
from lmoffload.kernels.codec import CODECS, encoder
from lmoffload.kernels.decode import coefficient_floats, emit_decode
from lmoffload.kernels.kv_rows import KVRows, Memo, Numbers, recalled
from lmoffload.kernels.newest import STORABLE
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.softmax import score_floats
from lmoffload_solver.counting import num_lines
from lmoffload_solver.formats import LINE_ELEMENTS

JOB_FLOATS = 1 << 14
"""Keys' and values' numbers worth a job of their own: some 5 microseconds, where a thread that looks begins in one."""

class Newest(NamedTuple):
    """What is known of one new token of each row, beside its query."""

    key: torch.Tensor
    """fp32 [R, heads, D] contiguous."""
    value: torch.Tensor
    """fp32 [R, heads, Dv] contiguous."""
    most: Numbers
    """int64 [R], what the rows' lengths may grow to while the memo is kept."""
    memo: Memo
    """Of layers whose keys, values and heads lie alike, for the same rows and window, and the same array of lengths, which may grow."""


@dataclass(frozen=True)
class DecodeKernel:
    """The compiled function of a pair of formats; its parameters are `decode.PARAMETERS`."""

    entry: int
    """Its address for a `board.Call`."""
    code: Compiled


@cache
def decode_kernel(key_format: str, value_format: str) -> DecodeKernel:
    """The compiled function, compiled at the first call (some tenths of a second)."""
    module = ir.Module("lmoffload_decode")
    entry = emit_entry(emit_decode(module, host_machine(), key_format, value_format))
    compiled = Compiled(module)
    return DecodeKernel(compiled.address(entry), compiled)


def compile_for(key_format: str, value_format: str) -> None:
    """Compile what keys and values of these formats are kept and read with: steps are measured."""
    decode_kernel(key_format, value_format)
    for name in {key_format, value_format} & CODECS.keys():
        encoder(name)


def decode_attention(
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
    pool: Pool,
    newest: Newest | None = None,
) -> torch.Tensor:
    """Attention of one new token of each of `rows` over the last tokens of that row, the new one included.

    Query heads h * G .. (h + 1) * G share key head h. The bits of a row depend on its own query, keys, values and length.

    Args:
        q: fp32 [R, H, D] contiguous.
        keys, values: of the same tokens: as many as the values have room for.
        rows: int64 [R].
        lengths: int64 [R] contiguous, tokens that each row has had, at least 1.
        scaling: factor on q . k.
        window: a query sees the last `window` tokens, its own included (transformers' sliding_window); None for all.
        softcap: logits become softcap * tanh(logits / softcap), after scaling.
        sinks: fp32 [H], one more logit a head that takes part in the softmax's sum alone.
        pool: who computes; (row, key head) pairs are shared out by length.
        newest: the new tokens, to be stored first; None: they are stored.

    Returns:
        fp32 [R, H, Dv].
    """
    num_rows, heads, dim = q.shape
    assert q.is_contiguous() and q.dtype == torch.float32, "q is fp32 and contiguous"
    assert keys.heads == values.heads and keys.dim == dim, "keys, values and q do not belong together"
    group, entry = heads // keys.heads, decode_kernel(keys.format, values.format).entry
    columns = LINE_ELEMENTS * num_lines(values.dim) if values.format in CODECS else values.dim
    memo, most = (None, lengths) if newest is None else (newest.memo, newest.most)
    tables = recalled(memo, lambda: _Tables.of(keys, values, rows, lengths, most, window, group, pool.threads))
    out = pool.empty(num_rows, heads, columns)
    scratch = pool.empty(len(tables.jobs), tables.num_scores + tables.num_coefficients)
    before = (
        *(q.data_ptr(), *_to_store(newest, keys, values, rows, lengths, pool), keys.data.data_ptr(), values.data.data_ptr()),
        *(*tables.addresses, out.data_ptr(), 0 if sinks is None else sinks.data_ptr()),
    )
    sizes = keys.heads, group, dim, values.dim, 4 * columns, NO_WINDOW if window is None else window
    reals, keeps = (real_word(scaling), real_word(softcap or 0.0)), (q, out, scratch, *(() if newest is None else newest[:2]))
    place, size = scratch.data_ptr(), 4 * scratch.shape[1]
    calls = [
        Call(entry, (*before, place + i * size, place + i * size + 4 * tables.num_scores, first, end, *sizes, *reals), keeps)
        for i, (first, end) in enumerate(tables.jobs)
    ]
    pool.run(calls)
    if columns == values.dim:
        return out
    pool.settle()
    return out[..., : values.dim]


def _to_store(newest: Newest | None, keys: KVRows, values: KVRows, rows: Numbers, lengths: Numbers, pool: Pool) -> Sequence[int]:
    """Where the keys and values lie that the kernel stores first; 0 for those that are stored."""
    if newest is None:
        return 0, 0
    places = []
    for kept, one in ((keys, newest.key), (values, newest.value)):
        assert one.is_contiguous() and one.dtype == torch.float32, "new keys and values are fp32 and contiguous"
        known = kept.format in STORABLE
        if not known:
            pool.settle()
            kept.store_tokens(rows, lengths - 1, one)
        places.append(one.data_ptr() if known else 0)
    return places


@dataclass(frozen=True)
class _Tables:
    """What follows from rows and what their lengths may be."""

    tables: tuple[Numbers, ...]
    """Of the rows: where keys and values begin, their rooms, lengths."""
    jobs: Sequence[tuple[int, int]]
    num_scores: int
    num_coefficients: int
    """fp32 numbers of a job's scratch."""

    @staticmethod
    def of(
        keys: KVRows, values: KVRows, rows: Numbers, lengths: Numbers, most: Numbers, window: int | None, group: int, threads: int
    ) -> _Tables:
        kept = np.minimum(most, np.minimum(values.rooms[rows], NO_WINDOW if window is None else window))
        assert (kept >= 1).all() and (most >= lengths).all(), "a row without a key, or longer than it may be"
        tables = [table[rows] for table in (keys.starts, values.starts, keys.rooms, values.rooms)]
        return _Tables(
            tables=tuple(np.ascontiguousarray(table) for table in (*tables, lengths)),
            jobs=share_pairs(kept.tolist(), keys.heads, keys.dim + values.dim, threads),
            num_scores=score_floats(group, int(kept.max(initial=0)) + LINE_ELEMENTS),
            num_coefficients=coefficient_floats(group, keys.dim),
        )

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        return tuple(table.ctypes.data for table in self.tables)


def share_pairs(spans: Sequence[int], num_kv_heads: int, floats: int, threads: int) -> list[tuple[int, int]]:
    """Ranges of (row, key head) pairs of nearly equal work: about JOBS_PER_THREAD a thread, one where the work is too little to share.

    spans: keys that each row reads. floats: numbers read for each key.
    """
    work = sum(spans) * num_kv_heads * floats
    jobs = 1 if threads == 1 or work < 2 * JOB_FLOATS else min(max(threads, work // JOB_FLOATS), threads * JOBS_PER_THREAD)
    edges, done, pair = [0], 0, 0
    for span in spans:
        for _ in range(num_kv_heads):
            done, pair = done + span * floats * jobs, pair + 1
            if done >= work * len(edges):
                edges.append(pair)
    return list(pairwise(edges))


def reference_decode_attention(
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
    """The same in plain torch, row by row, in q's precision."""
    out = q.new_empty(q.shape[0], q.shape[1], values.dim)
    for index, (row, end) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        first = end - min(end, int(values.rooms[row]), NO_WINDOW if window is None else window)
        k, v = (each.widened(row, first, end).to(q.dtype) for each in (keys, values))
        grouped = q[index].view(keys.heads, -1, keys.dim)
        scores = softcapped(grouped @ k.transpose(1, 2) * scaling, softcap)
        out[index] = (weights_of(scores, sinks) @ v).view(-1, values.dim)
    return out
