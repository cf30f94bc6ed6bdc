"""Emit decode attention: one query token a row over that row's keys and values, query heads grouped by the key head they share."""

from __future__ import annotations

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I64, Code, Machine, V
from lmoffload.kernels.softmax import Parts, emit_score_row

KEY_BLOCK = 16
"""Keys that all query heads of a group meet before the next are touched; sums over values are added up as often."""

KEYS_AHEAD = 32
"""How far ahead keys and values are asked for: the machine's own prefetching ends at every page. Gained 15 % (measured)."""

PARAMETERS = (
    ("q", ADDRESS), ("keys", ADDRESS), ("values", ADDRESS), ("key_starts", ADDRESS), ("value_starts", ADDRESS), ("capacities", ADDRESS),
    ("lengths", ADDRESS), ("out", ADDRESS), ("sinks", ADDRESS), ("scores", ADDRESS), ("first_pair", I64), ("end_pair", I64),
    ("kv_heads", I64), ("group", I64), ("dim", I64), ("value_dim", I64), ("window", I64), ("scaling", F32), ("softcap", F32),
)  # fmt: skip
"""Of the compiled function. Pairs are row * kv_heads + key head. window: larger than any length for none; softcap, sinks: 0 for none.
scores: fp32 [`score_floats(group, longest span)`]."""


def emit_decode(module: ir.Module, machine: Machine, parts: Parts) -> Code:
    """Emit the function over a range of (row, key head) pairs."""
    code = Code(module, machine, "decode_attention", [kind for _, kind in PARAMETERS])
    a = dict(zip((name for name, _ in PARAMETERS), code.arguments, strict=True))
    b, zero, four = code.b, code.whole(0), code.whole(4)
    key_row, value_row = b.mul(four, a["dim"]), b.mul(four, a["value_dim"])

    def number(name: str, row: V) -> V:
        return code.load(I64, code.row(a[name], row, code.whole(8)))

    def pair(index: V) -> None:
        row, head = b.sdiv(index, a["kv_heads"]), b.srem(index, a["kv_heads"])
        end = number("lengths", row)
        first = b.sub(end, code.least(end, a["window"]))
        count = b.sub(end, first)
        line = b.add(b.mul(head, number("capacities", row)), first)
        keys = code.row(code.row(a["keys"], number("key_starts", row), four), line, key_row)
        values = code.row(code.row(a["values"], number("value_starts", row), four), line, value_row)
        query_head = b.mul(index, a["group"])
        q, out = code.row(a["q"], query_head, key_row), code.row(a["out"], query_head, value_row)
        score_row = emit_score_row(code, count)
        code.fill(a["scores"], b.mul(b.sdiv(score_row, four), a["group"]))
        code.fill(out, b.mul(a["group"], a["value_dim"]))

        def score(start: V) -> None:
            number = code.least(code.whole(KEY_BLOCK), b.sub(count, start))
            place = code.row(a["scores"], start, four)
            code.prefetch(code.row(keys, b.add(start, code.whole(KEYS_AHEAD)), key_row), b.mul(number, key_row))
            code.call(parts.sweep, code.row(keys, start, key_row), key_row, number, q, key_row, a["group"], place, score_row, a["dim"])

        def sum_up(start: V) -> None:
            number = code.least(code.whole(KEY_BLOCK), b.sub(count, start))
            weights, block = code.row(a["scores"], start, four), code.row(values, start, value_row)
            code.prefetch(code.row(values, b.add(start, code.whole(KEYS_AHEAD)), value_row), b.mul(number, value_row))
            code.call(parts.mix, weights, score_row, a["group"], block, value_row, number, out, value_row, a["value_dim"])

        code.each(zero, count, KEY_BLOCK, score)
        sink = code.row(a["sinks"], b.mul(head, a["group"]), four)
        has_sinks = b.icmp_unsigned("!=", a["sinks"], ir.Constant(ADDRESS, None))
        sink = b.select(has_sinks, sink, ir.Constant(ADDRESS, None))
        code.call(parts.softmax, a["scores"], score_row, zero, count, a["group"], sink, a["scaling"], a["softcap"])
        code.each(zero, count, KEY_BLOCK, sum_up)

    code.each(a["first_pair"], a["end_pair"], 1, pair)
    return code.end()
