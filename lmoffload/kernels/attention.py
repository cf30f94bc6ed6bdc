"""Prefill attention: causal, within each segment of a packed sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from llvmlite import ir
from torch.nn import functional

from lmoffload.kernels.code import Compiled, host_machine
from lmoffload.kernels.pool import Pool, Scratch
from lmoffload.kernels.prefill import QUERY_BLOCK, emit_prefill
from lmoffload.kernels.softmax import emit_parts, score_floats

NO_WINDOW = 2**62

JOB_PRODUCTS = 1 << 21
"""Products worth a job of their own: about 50 microseconds."""

JOBS_PER_THREAD = 4

_SCORES = Scratch()


@cache
def prefill_kernel() -> Callable[..., None]:
    """The compiled function, compiled at the first call; its parameters are `prefill.PARAMETERS`."""
    module, machine = ir.Module("lmoffload_prefill"), host_machine()
    prefill = emit_prefill(module, machine, emit_parts(module, machine))
    return Compiled(module).function(prefill)


def prefill_attention(
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
    pool: Pool,
) -> torch.Tensor:
    """Causal attention within each segment of a packed sequence and nothing across; a row's bits depend on its own segment.

    Memory beyond the result is a thread's scores of one block of queries; no mask is made.

    Args:
        q: fp32 [T, H, D]; k: fp32 [T, KV, D]; v: fp32 [T, KV, Dv]; each token's heads contiguous.
        segments: (first, end) tokens of each sequence.
        known: tokens of the only segment that q leaves out, whose attention is known already; a multiple of QUERY_BLOCK.
        scaling: factor on q . k.
        window: a query sees the last `window` tokens, its own included (transformers' sliding_window); None for all.
        softcap: logits become softcap * tanh(logits / softcap), after scaling.
        sinks: fp32 [H], one more logit a head that takes part in the softmax's sum alone.
        pool: who computes; segments, heads and queries are shared out.

    Returns:
        fp32 [T - known, H, Dv]; tokens outside every segment are zeros.
    """
    heads, dim, kv_heads, value_dim = q.shape[1], q.shape[2], k.shape[1], v.shape[2]
    q, k, v = (t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous() for t in (q, k, v))
    assert q.dtype == k.dtype == v.dtype == torch.float32, "q, k and v are fp32"
    out = pool.empty(q.shape[0], heads, value_dim).zero_()
    kernel = prefill_kernel()

    def attend(job: PrefillJob) -> None:
        keys = job.end_query if window is None else min(job.end_query, window + QUERY_BLOCK)
        scores = _SCORES.floats(score_floats(QUERY_BLOCK, keys))
        places = (job.token - known, job.token, job.token, job.token - known)
        sink_address = 0 if sinks is None else sinks.data_ptr()
        kernel(
            *(t.data_ptr() + 4 * place * t.stride(0) for t, place in zip((q, k, v, out), places, strict=True)),
            sink_address, scores.data_ptr(),
            job.first_query, job.end_query, job.first_head, job.end_head, heads // kv_heads, dim, value_dim,
            *(4 * t.stride(0) for t in (q, k, v, out)), NO_WINDOW if window is None else window, scaling, softcap or 0.0,
        )  # fmt: skip

    assert known == 0 or (len(segments) == 1 and known % QUERY_BLOCK == 0), "queries go on at a whole block of one segment"
    jobs = share_segments(segments, heads, dim + value_dim, window, pool.threads, known)
    pool.run([partial(attend, job) for job in jobs])
    return out


class PrefillJob(NamedTuple):
    """Queries and heads of one segment, counted from its first token."""

    token: int
    first_query: int
    end_query: int
    first_head: int
    end_head: int


def share_segments(
    segments: Sequence[tuple[int, int]], heads: int, floats: int, window: int | None, threads: int, known: int = 0
) -> list[PrefillJob]:
    """Jobs of nearly equal work, the longest queries first; a segment is cut by heads, then by blocks of queries from `known` on."""
    sizes = [end - first for first, end in segments]
    works = [heads * floats * size * min(size, window or size) // 2 for size in sizes]
    least = max(JOB_PRODUCTS, sum(works) // (threads * JOBS_PER_THREAD) + 1)
    jobs = []
    for (token, _), size, work in zip(segments, sizes, works, strict=True):
        pieces = 1 if threads == 1 else -(-work // least)
        by_head = min(pieces, heads)
        begun, blocks = known // QUERY_BLOCK, -(-(size - known) // QUERY_BLOCK)
        by_query = min(-(-pieces // by_head), blocks) if by_head else 0
        for i in reversed(range(by_query)):
            first, end = (begun + blocks * at // by_query for at in (i, i + 1))
            queries = (first * QUERY_BLOCK, min(size, end * QUERY_BLOCK))
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
        scores = softcapped(grouped @ k[first:end].permute(1, 2, 0)[:, None] * scaling, softcap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        out[first:end] = (weights_of(scores, sinks) @ v[first:end].permute(1, 0, 2)[:, None]).reshape(heads, size, -1).transpose(0, 1)
    return out


def softcapped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def weights_of(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension of [kv_heads, group, ..., keys]; a sink is one more logit a head, whose weight is dropped."""
    if sinks is None:
        return functional.softmax(scores, dim=-1)
    extra = sinks.view(*scores.shape[:2], *[1] * (scores.dim() - 2)).expand(*scores.shape[:-1], 1)
    return functional.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
