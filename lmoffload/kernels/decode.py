"""Emit decode attention: one query token a row over that row's keys and values, query heads grouped by the key head they share.

Keys and values lie as `kv_rows` says. Scores come oldest token first; token p of a ring of n is at p mod n, so a range of tokens is one run
of memory, or two.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I64, Code, Machine, V
from lmoffload.kernels.codec import CODECS, emit_encode_line
from lmoffload.kernels.dots import emit_sweep
from lmoffload.kernels.newest import STORABLE, emit_store_key, emit_store_value
from lmoffload.kernels.panel import emit_panel
from lmoffload.kernels.softmax import emit_mix, emit_score_row, emit_softmax
from lmoffload_solver.counting import NEWEST_FORMAT
from lmoffload_solver.formats import FORMATS, LINE_ELEMENTS, PARAMETER_BYTES

KEY_BLOCK = 16
"""Keys that all query heads of a group meet before the next are touched; sums over values are added up as often."""

LINES_AT_ONCE = 128
"""Quantized tokens whose weights are scaled at once."""

KEYS_AHEAD = 32
"""How far ahead keys and values are asked for: the machine's own prefetching ends at every page. Gained 15 % (measured)."""

PARAMETERS = (
    ("q", ADDRESS), ("new_keys", ADDRESS), ("new_values", ADDRESS), ("keys", ADDRESS), ("values", ADDRESS), ("key_starts", ADDRESS),
    ("value_starts", ADDRESS), ("key_rooms", ADDRESS), ("value_rooms", ADDRESS), ("lengths", ADDRESS), ("out", ADDRESS),
    ("sinks", ADDRESS), ("scores", ADDRESS), ("coefficients", ADDRESS), ("first_pair", I64), ("end_pair", I64), ("kv_heads", I64),
    ("group", I64), ("dim", I64), ("value_dim", I64), ("out_row", I64), ("window", I64), ("scaling", F32), ("softcap", F32),
)  # fmt: skip
"""Of the compiled function. Pairs are row * kv_heads + key head. new_keys, new_values: fp32 [pairs, dim] and [pairs, value_dim], stored as
the newest before anything is read; 0 where they are stored already. window: larger than any length for none; softcap, sinks: 0 for none.
scores: fp32 [`score_floats(group, longest span + 31)`]; coefficients: fp32 [`coefficient_floats(group, dim)`]; out_row: bytes from head to
head, whole lines of 32 where values are quantized."""


def coefficient_floats(group: int, dim: int) -> int:
    """fp32 numbers of the scratch for coefficients."""
    return group * max(dim, LINES_AT_ONCE)


def emit_decode(module: ir.Module, machine: Machine, key_format: str, value_format: str) -> Code:
    """Emit the function over a range of (row, key head) pairs."""
    plain = {kind for kind in (key_format, value_format) if kind not in CODECS}
    sweep = emit_sweep(module, machine, key_format if key_format in plain else NEWEST_FORMAT)
    panels = {kind: emit_panel(module, machine, CODECS[kind]) for kind in {key_format, value_format} - plain}
    mix = emit_mix(module, machine, value_format) if value_format in plain else None
    softmax = emit_softmax(module, machine)
    encoders = {kind: emit_encode_line(module, machine, CODECS[kind]) for kind in panels}
    storing = [(emit_store_key, key_format, "key", "dim"), (emit_store_value, value_format, "value", "value_dim")]
    stores = [
        (emit(module, machine, kind, encoders.get(kind)), name, size) for emit, kind, name, size in storing if kind in STORABLE
    ]
    code = Code(module, machine, "decode_attention", [kind for _, kind in PARAMETERS])
    a = dict(zip((name for name, _ in PARAMETERS), code.arguments, strict=True))
    b, four = code.b, code.whole(4)
    keys, values = _Keys(code, a, key_format, sweep, panels.get(key_format)), _Values(code, a, value_format, mix, panels.get(value_format))

    def number(name: str, row: V) -> V:
        return code.load(I64, code.row(a[name], row, code.whole(8)))

    def pair(index: V) -> None:
        row, head = b.sdiv(index, a["kv_heads"]), b.srem(index, a["kv_heads"])
        end, value_room = number("lengths", row), number("value_rooms", row)
        first = b.sub(end, code.least(end, code.least(a["window"], value_room)))
        base = first if key_format in plain else b.and_(first, code.whole(-LINE_ELEMENTS))
        count = b.sub(end, base)
        query_head = b.mul(index, a["group"])
        for store, name, size in stores:
            with code.when(b.icmp_unsigned("!=", a[f"new_{name}s"], ir.Constant(ADDRESS, None))):
                new, place = code.row(a[f"new_{name}s"], index, b.mul(four, a[size])), b.sub(end, code.whole(1))
                there = code.at(a[f"{name}s"], number(f"{name}_starts", row))
                code.call(store, new, there, head, number(f"{name}_rooms", row), place, a[size])
        q, out = code.row(a["q"], query_head, b.mul(four, a["dim"])), code.row(a["out"], query_head, a["out_row"])
        score_row = emit_score_row(code, count)
        code.fill(a["scores"], b.mul(b.sdiv(score_row, four), a["group"]))
        code.fill(out, b.mul(a["group"], b.sdiv(a["out_row"], four)))
        keys.score(code.at(a["keys"], number("key_starts", row)), head, number("key_rooms", row), base, end, q, score_row)
        sink = code.row(a["sinks"], b.mul(head, a["group"]), four)
        has_sinks = b.icmp_unsigned("!=", a["sinks"], ir.Constant(ADDRESS, None))
        sink = b.select(has_sinks, sink, ir.Constant(ADDRESS, None))
        code.call(softmax, a["scores"], score_row, b.sub(first, base), count, a["group"], sink, a["scaling"], a["softcap"])
        weights = code.row(a["scores"], b.sub(first, base), four)
        values.add_up(code.at(a["values"], number("value_starts", row)), head, value_room, first, end, weights, score_row, out)

    code.each(a["first_pair"], a["end_pair"], 1, pair)
    return code.end()


def each_run(code: Code, first: V, end: V, room: V, body: Callable[[V, V, V], None]) -> None:
    """body(first token, end token, place of the first) for each of the runs of memory that tokens first..end of a ring take."""
    b = code.b
    place = b.srem(first, room)
    turn = code.least(end, b.add(first, b.sub(room, place)))

    def run(number: V) -> None:
        later = b.icmp_signed("!=", number, code.whole(0))
        body(b.select(later, turn, first), b.select(later, end, turn), b.select(later, code.whole(0), place))

    code.each(code.whole(0), code.whole(2), 1, run)


class _Keys:
    """Scores of one head's queries with its keys."""

    def __init__(self, code: Code, a: dict[str, V], format_name: str, sweep: Code, panel: Code | None) -> None:
        self.code, self.a, self.sweep, self.panel = code, a, sweep, panel
        self.format_name = format_name

    def score(self, keys: V, head: V, room: V, base: V, end: V, q: V, score_row: V) -> None:
        """Scores of tokens base..end, base first."""
        code, b, dim = self.code, self.code.b, self.a["dim"]
        if self.panel is None:
            size = code.whole(FORMATS[self.format_name].block_bytes)
            key_row = b.mul(size, dim)
            mine = code.row(keys, b.mul(head, room), key_row)

            def run(first: V, stop: V, place: V) -> None:
                self._sweep(code.row(mine, place, key_row), key_row, b.sub(stop, first), b.sub(first, base), q, score_row)

            each_run(code, base, end, room, run)
            return
        codec = CODECS[self.format_name]
        group_bytes = b.mul(dim, code.whole(codec.line_bytes + PARAMETER_BYTES))
        newest_row = b.mul(dim, code.whole(FORMATS[NEWEST_FORMAT].block_bytes))
        mine = code.row(keys, head, b.add(b.mul(room, group_bytes), b.mul(newest_row, code.whole(LINE_ELEMENTS))))
        width = code.whole(LINE_ELEMENTS)
        panel = self.panel

        def one(group: V) -> None:
            codes = code.row(mine, b.srem(group, room), group_bytes)
            code.prefetch(code.at(codes, group_bytes), group_bytes)
            stored = code.row(codes, dim, code.whole(codec.line_bytes))
            place = code.row(self.a["scores"], b.sub(b.mul(group, width), base), code.whole(4))
            q_row = b.mul(dim, code.whole(4))
            code.call(panel, codes, stored, dim, q, q_row, self.a["group"], place, score_row, self.a["coefficients"])

        whole_end = b.sdiv(end, width)
        code.each(b.sdiv(base, width), whole_end, 1, one)
        begin = b.mul(whole_end, width)
        self._sweep(code.row(mine, room, group_bytes), newest_row, b.sub(end, begin), b.sub(begin, base), q, score_row)

    def _sweep(self, keys: V, key_row: V, count: V, column: V, q: V, score_row: V) -> None:
        """Plain keys, from a column of the scores on."""
        code, b, a = self.code, self.code.b, self.a
        q_row = b.mul(a["dim"], code.whole(4))

        def block(start: V) -> None:
            number = code.least(code.whole(KEY_BLOCK), b.sub(count, start))
            place = code.row(a["scores"], b.add(column, start), code.whole(4))
            code.prefetch(code.row(keys, b.add(start, code.whole(KEYS_AHEAD)), key_row), b.mul(number, key_row))
            code.call(self.sweep, code.row(keys, start, key_row), key_row, number, q, q_row, a["group"], place, score_row, a["dim"])

        code.each(code.whole(0), count, KEY_BLOCK, block)


class _Values:
    """Sums of one head's values by weight."""

    def __init__(self, code: Code, a: dict[str, V], format_name: str, mix: Code | None, panel: Code | None) -> None:
        self.code, self.a, self.mix, self.panel = code, a, mix, panel
        self.format_name = format_name

    def add_up(self, values: V, head: V, room: V, first: V, end: V, weights: V, score_row: V, out: V) -> None:
        """Add the values of tokens first..end; weights begin with the first's."""
        code, b = self.code, self.code.b

        def run(start: V, stop: V, place: V) -> None:
            column = code.row(weights, b.sub(start, first), code.whole(4))
            if self.panel is None:
                self._plain(values, b.add(b.mul(head, room), place), b.sub(stop, start), column, score_row, out)
            else:
                self._quantized(values, head, room, place, b.sub(stop, start), column, score_row, out)

        each_run(code, first, end, room, run)

    def _plain(self, values: V, line: V, count: V, weights: V, score_row: V, out: V) -> None:
        code, b, a, mix = self.code, self.code.b, self.a, self.mix
        assert mix is not None
        value_row = b.mul(a["value_dim"], code.whole(FORMATS[self.format_name].block_bytes))
        mine = code.row(values, line, value_row)

        def block(start: V) -> None:
            number = code.least(code.whole(KEY_BLOCK), b.sub(count, start))
            code.prefetch(code.row(mine, b.add(start, code.whole(KEYS_AHEAD)), value_row), b.mul(number, value_row))
            some, lines = code.row(weights, start, code.whole(4)), code.row(mine, start, value_row)
            code.call(mix, some, score_row, a["group"], lines, value_row, number, out, a["out_row"], a["value_dim"])

        code.each(code.whole(0), count, KEY_BLOCK, block)

    def _quantized(self, values: V, head: V, room: V, place: V, count: V, weights: V, score_row: V, out: V) -> None:
        code, b, a, panel = self.code, self.code.b, self.a, self.panel
        assert panel is not None
        line_bytes = code.whole(CODECS[self.format_name].line_bytes)
        panel_bytes = b.mul(room, b.add(line_bytes, code.whole(PARAMETER_BYTES)))
        panels = b.sdiv(a["out_row"], code.whole(4 * LINE_ELEMENTS))

        def one(number: V) -> None:
            mine = code.row(values, b.add(b.mul(head, panels), number), panel_bytes)
            codes = code.row(mine, place, line_bytes)
            stored = code.row(code.row(mine, room, line_bytes), place, code.whole(PARAMETER_BYTES))
            target = code.row(out, number, code.whole(4 * LINE_ELEMENTS))

            def block(start: V) -> None:
                some, lines = code.row(weights, start, code.whole(4)), code.row(codes, start, line_bytes)
                taken = code.least(code.whole(LINES_AT_ONCE), b.sub(count, start))
                code.prefetch(code.row(lines, code.whole(LINES_AT_ONCE), line_bytes), b.mul(taken, line_bytes))
                parameters = code.row(stored, start, code.whole(PARAMETER_BYTES))
                scratch = a["coefficients"]
                code.call(panel, lines, parameters, taken, some, score_row, a["group"], target, a["out_row"], scratch)

            code.each(code.whole(0), count, LINES_AT_ONCE, block)

        code.each(code.whole(0), panels, 1, one)
