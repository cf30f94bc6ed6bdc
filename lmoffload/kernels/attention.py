"""Attention over packed sequences: one query a row in decode, whole prompts in prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from llvmlite import ir
from torch.nn import functional

from lmoffload.kernels.code import Compiled, host_machine
from lmoffload.kernels.decode import emit_decode
from lmoffload.kernels.pool import Pool, Scratch
from lmoffload.kernels.prefill import QUERY_BLOCK, emit_prefill
from lmoffload.kernels.softmax import emit_parts, score_floats

NO_WINDOW = 2**62

JOB_FLOATS = 1 << 17
"""Keys' and values' floats worth a job of their own: about 50 microseconds."""

JOB_PRODUCTS = 1 << 21
"""The same in products of prefill attention."""

JOBS_PER_THREAD = 4

_SCORES = Scratch()


@dataclass(frozen=True)
class AttentionKernels:
    """The compiled functions; their parameters are `decode.PARAMETERS` and `prefill.PARAMETERS`."""

    decode: Callable[..., None]
    prefill: Callable[..., None]


@cache
def attention_kernels() -> AttentionKernels:
    """The compiled functions, compiled at the first call (about half a second)."""
    module, machine = ir.Module("lmoffload_attention"), host_machine()
    parts = emit_parts(module, machine)
    decode, prefill = emit_decode(module, machine, parts), emit_prefill(module, machine, parts)
    compiled = Compiled(module)
    return AttentionKernels(compiled.function(decode), compiled.function(prefill))


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
    """Attention of one new token a row over that row's keys and values.

    Row r's keys are keys[key_starts[r]:][: num_kv_heads * capacities[r] * D] seen as [num_kv_heads, capacities[r], D], of which the first
    lengths[r] tokens are valid, the new one included; values likewise with Dv. Query heads h * G .. (h + 1) * G share key head h.
    The bits of a row depend on its own query, keys, values and length.

    Args:
        q: fp32 [R, H, D] contiguous.
        keys, values: fp32, one-dimensional.
        key_starts, value_starts, capacities, lengths: int64 [R], in elements and tokens; lengths at least 1.
        value_dim: Dv; D where None.
        scaling: factor on q . k.
        window: a query sees the last `window` tokens, its own included (transformers' sliding_window); None for all.
        softcap: logits become softcap * tanh(logits / softcap), after scaling.
        sinks: fp32 [H], one more logit a head that takes part in the softmax's sum alone.
        pool: who computes; (row, key head) pairs are shared out by length.

    Returns:
        fp32 [R, H, Dv].
    """
    rows, heads, dim = q.shape
    value_dim = dim if value_dim is None else value_dim
    assert q.is_contiguous() and q.dtype == keys.dtype == values.dtype == torch.float32, "q, keys and values are fp32, q contiguous"
    spans = [length if window is None else min(length, window) for length in lengths.tolist()]
    assert min(spans, default=1) >= 1, "a row without a key"
    group = heads // num_kv_heads
    out = torch.empty(rows, heads, value_dim)
    kernel, scratch_size = attention_kernels().decode, score_floats(group, max(spans, default=0))

    def attend(first: int, end: int) -> None:
        scores = _SCORES.floats(scratch_size)
        kernel(
            q.data_ptr(), keys.data_ptr(), values.data_ptr(), key_starts.data_ptr(), value_starts.data_ptr(), capacities.data_ptr(),
            lengths.data_ptr(), out.data_ptr(), 0 if sinks is None else sinks.data_ptr(), scores.data_ptr(), first, end,
            num_kv_heads, group, dim, value_dim, NO_WINDOW if window is None else window, scaling, softcap or 0.0,
        )  # fmt: skip

    pool.run([partial(attend, first, end) for first, end in share_pairs(spans, num_kv_heads, dim + value_dim, pool.threads)])
    return out


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
    """Causal attention within each segment of a packed sequence and nothing across; a row's bits depend on its own segment.

    Memory beyond the result is a thread's scores of one block of queries; no mask is made.

    Args:
        q: fp32 [T, H, D]; k: fp32 [T, KV, D]; v: fp32 [T, KV, Dv]; each token's heads contiguous.
        segments: (first, end) tokens of each sequence.
        scaling, window, softcap, sinks: as in `decode_attention`.
        pool: who computes; segments, heads and queries are shared out.

    Returns:
        fp32 [T, H, Dv]; tokens outside every segment are zeros.
    """
    heads, dim, kv_heads, value_dim = q.shape[1], q.shape[2], k.shape[1], v.shape[2]
    q, k, v = (t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous() for t in (q, k, v))
    assert q.dtype == k.dtype == v.dtype == torch.float32, "q, k and v are fp32"
    out = torch.zeros(q.shape[0], heads, value_dim)
    kernel = attention_kernels().prefill

    def attend(job: PrefillJob) -> None:
        keys = job.end_query if window is None else min(job.end_query, window + QUERY_BLOCK)
        scores = _SCORES.floats(score_floats(QUERY_BLOCK, keys))
        sink_address = 0 if sinks is None else sinks.data_ptr()
        kernel(
            *(t.data_ptr() + 4 * job.token * t.stride(0) for t in (q, k, v, out)), sink_address, scores.data_ptr(),
            job.first_query, job.end_query, job.first_head, job.end_head, heads // kv_heads, dim, value_dim,
            *(4 * t.stride(0) for t in (q, k, v, out)), NO_WINDOW if window is None else window, scaling, softcap or 0.0,
        )  # fmt: skip

    jobs = share_segments(segments, heads, dim + value_dim, window, pool.threads)
    pool.run([partial(attend, job) for job in jobs])
    return out


class PrefillJob(NamedTuple):
    """Queries and heads of one segment, counted from its first token."""

    token: int
    first_query: int
    end_query: int
    first_head: int
    end_head: int


def share_segments(segments: Sequence[tuple[int, int]], heads: int, floats: int, window: int | None, threads: int) -> list[PrefillJob]:
    """Jobs of nearly equal work, the longest queries first; a segment is cut by heads, then by blocks of queries."""
    sizes = [end - first for first, end in segments]
    works = [heads * floats * size * min(size, window or size) // 2 for size in sizes]
    least = max(JOB_PRODUCTS, sum(works) // (threads * JOBS_PER_THREAD) + 1)
    jobs = []
    for (token, _), size, work in zip(segments, sizes, works, strict=True):
        pieces = 1 if threads == 1 else -(-work // least)
        by_head = min(pieces, heads)
        blocks = -(-size // QUERY_BLOCK)
        by_query = min(-(-pieces // by_head), blocks) if by_head else 0
        for i in reversed(range(by_query)):
            queries = (blocks * i // by_query * QUERY_BLOCK, min(size, blocks * (i + 1) // by_query * QUERY_BLOCK))
            jobs += [PrefillJob(token, *queries, heads * j // by_head, heads * (j + 1) // by_head) for j in range(by_head)]
    return jobs


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
