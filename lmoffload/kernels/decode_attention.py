"""Decode attention: one query a row over that row's stored keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise

import numpy as np
import torch
from llvmlite import ir

from lmoffload.kernels.attention import JOBS_PER_THREAD, NO_WINDOW, softcapped, weights_of
from lmoffload.kernels.code import Compiled, host_machine
from lmoffload.kernels.codec import CODECS
from lmoffload.kernels.decode import coefficient_floats, emit_decode
from lmoffload.kernels.kv_rows import KVRows, Numbers
from lmoffload.kernels.pool import Pool, Scratch
from lmoffload.kernels.softmax import score_floats
from lmoffload_solver.counting import num_lines
from lmoffload_solver.formats import LINE_ELEMENTS

JOB_FLOATS = 1 << 17
"""Keys' and values' numbers worth a job of their own: about 50 microseconds."""

_SCRATCH = Scratch()


@cache
def decode_kernel(key_format: str, value_format: str) -> Callable[..., None]:
    """The compiled function, compiled at the first call (some tenths of a second); its parameters are `decode.PARAMETERS`."""
    module = ir.Module("lmoffload_decode")
    decode = emit_decode(module, host_machine(), key_format, value_format)
    return Compiled(module).function(decode)


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
) -> torch.Tensor:
    """Attention of one new token of each of `rows` over the last tokens of that row, which are stored, the new one included.

    Query heads h * G .. (h + 1) * G share key head h. The bits of a row depend on its own query, keys, values and length.

    Args:
        q: fp32 [R, H, D] contiguous.
        keys, values: of the same tokens: as many as the values have room for.
        rows: int64 [R].
        lengths: int64 [R], tokens that each row has had, at least 1.
        scaling: factor on q . k.
        window: a query sees the last `window` tokens, its own included (transformers' sliding_window); None for all.
        softcap: logits become softcap * tanh(logits / softcap), after scaling.
        sinks: fp32 [H], one more logit a head that takes part in the softmax's sum alone.
        pool: who computes; (row, key head) pairs are shared out by length.

    Returns:
        fp32 [R, H, Dv].
    """
    num_rows, heads, dim = q.shape
    assert q.is_contiguous() and q.dtype == torch.float32, "q is fp32 and contiguous"
    assert keys.heads == values.heads and keys.dim == dim, "keys, values and q do not belong together"
    kept = np.minimum(lengths, np.minimum(values.rooms[rows], NO_WINDOW if window is None else window))
    assert num_rows == 0 or (kept >= 1).all(), "a row without a key"
    group = heads // keys.heads
    columns = LINE_ELEMENTS * num_lines(values.dim) if values.format in CODECS else values.dim
    out = torch.empty(num_rows, heads, columns)
    kernel = decode_kernel(keys.format, values.format)
    num_scores, num_coefficients = score_floats(group, int(kept.max(initial=0)) + LINE_ELEMENTS), coefficient_floats(group, dim)
    tables = [np.ascontiguousarray(table[rows]) for table in (keys.starts, values.starts, keys.rooms, values.rooms)]
    tables.append(np.ascontiguousarray(lengths))
    addresses = [table.ctypes.data for table in tables]

    def attend(first: int, end: int) -> None:
        scratch = _SCRATCH.floats(num_scores + num_coefficients)
        kernel(
            q.data_ptr(), keys.data.data_ptr(), values.data.data_ptr(), *addresses, out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(), scratch.data_ptr(), scratch.data_ptr() + 4 * num_scores, first, end,
            keys.heads, group, dim, values.dim, 4 * columns, NO_WINDOW if window is None else window, scaling, softcap or 0.0,
        )  # fmt: skip

    pool.run([partial(attend, first, end) for first, end in share_pairs(kept.tolist(), keys.heads, dim + values.dim, pool.threads)])
    return out[..., : values.dim]


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
