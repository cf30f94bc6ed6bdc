"""Emit prefill attention: causal attention within one segment, by blocks of queries."""

from __future__ import annotations

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I64, Code, Machine, V
from lmoffload.kernels.softmax import Parts, emit_score_row

QUERY_BLOCK = 24
"""Queries whose scores are held at once: a whole number of the micro-kernels' groups."""

KEY_BLOCK = 256
"""Keys that a block of queries meets before the next are touched: 64 KiB at a head size of 64."""

PARAMETERS = (
    ("q", ADDRESS), ("k", ADDRESS), ("v", ADDRESS), ("out", ADDRESS), ("sinks", ADDRESS), ("scores", ADDRESS), ("first_query", I64),
    ("end_query", I64), ("first_head", I64), ("end_head", I64), ("group", I64), ("dim", I64), ("value_dim", I64), ("q_row", I64),
    ("k_row", I64), ("v_row", I64), ("out_row", I64), ("window", I64), ("scaling", F32), ("softcap", F32),
)  # fmt: skip
"""Of the compiled function. q, k, v and out begin at the segment's first token; *_row: bytes from a token to the next; out is zero.
first_query is a multiple of QUERY_BLOCK. window: larger than any length for none; softcap, sinks: 0 for none.
scores: fp32 [`score_floats(QUERY_BLOCK, most keys of a block)`]."""


def emit_prefill(module: ir.Module, machine: Machine, parts: Parts) -> Code:
    """Emit the function over ranges of a segment's queries and heads."""
    code = Code(module, machine, "prefill_attention", [kind for _, kind in PARAMETERS])
    a = dict(zip((name for name, _ in PARAMETERS), code.arguments, strict=True))
    b, zero, four = code.b, code.whole(0), code.whole(4)
    head_bytes, value_bytes = b.mul(four, a["dim"]), b.mul(four, a["value_dim"])

    def block(first: V, head: V) -> None:
        queries = code.least(code.whole(QUERY_BLOCK), b.sub(a["end_query"], first))
        end = b.add(first, queries)
        first_key = code.least_seen(first, a["window"])
        keys = b.sub(end, first_key)
        score_row = emit_score_row(code, keys)
        kv_head = b.sdiv(head, a["group"])
        k = code.row(code.row(a["k"], kv_head, head_bytes), first_key, a["k_row"])
        v = code.row(code.row(a["v"], kv_head, value_bytes), first_key, a["v_row"])
        q = code.row(code.row(a["q"], head, head_bytes), first, a["q_row"])
        out = code.row(code.row(a["out"], head, value_bytes), first, a["out_row"])
        code.fill(a["scores"], b.mul(b.sdiv(score_row, four), queries))

        def score(start: V) -> None:
            number = code.least(code.whole(KEY_BLOCK), b.sub(keys, start))
            place = code.row(a["scores"], start, four)
            code.call(parts.sweep, code.row(k, start, a["k_row"]), a["k_row"], number, q, a["q_row"], queries, place, score_row, a["dim"])

        def weigh(query: V) -> None:
            place = b.add(first, query)
            seen = b.sub(code.least_seen(place, a["window"]), first_key)
            row, behind = code.row(a["scores"], query, score_row), b.sub(b.add(place, code.whole(1)), first_key)
            sink = b.select(has_sinks, code.row(a["sinks"], head, four), none)
            code.call(parts.softmax, row, score_row, seen, behind, code.whole(1), sink, a["scaling"], a["softcap"])

        def sum_up(start: V) -> None:
            number = code.least(code.whole(KEY_BLOCK), b.sub(keys, start))
            weights, values = code.row(a["scores"], start, four), code.row(v, start, a["v_row"])
            code.call(parts.mix, weights, score_row, queries, values, a["v_row"], number, out, a["out_row"], a["value_dim"])

        code.each(zero, keys, KEY_BLOCK, score)
        code.each(zero, queries, 1, weigh)
        code.each(zero, keys, KEY_BLOCK, sum_up)

    none = ir.Constant(ADDRESS, None)
    has_sinks = b.icmp_unsigned("!=", a["sinks"], none)
    code.each(a["first_query"], a["end_query"], QUERY_BLOCK, lambda first: code.each(
        a["first_head"], a["end_head"], 1, lambda head: block(first, head)
    ))  # fmt: skip
    return code.end()
