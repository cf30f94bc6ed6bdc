"""Emit what both attentions share behind their scores: softmax, and sums of values by weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I64, Code, Machine, V
from lmoffload.kernels.dots import Rows, emit_sweep
from lmoffload.kernels.functions import exp_of_negative, tanh
from lmoffload.kernels.stored import load_plain
from lmoffload_solver.formats import FORMATS

GROUP_SIZES = (4, 2, 1)
"""Rows of weights that meet a value vector while it is in a register."""

SCORE_LANES = 16
"""Rows of scores are padded to an odd number of these: whole vectors, and rows no power of two apart, where loads would wait for stores."""


@dataclass(frozen=True)
class Parts:
    """Functions that prefill attention calls: scores, weights, and sums of values."""

    sweep: Code
    softmax: Code
    mix: Code


def emit_parts(module: ir.Module, machine: Machine) -> Parts:
    """Emit them."""
    return Parts(emit_sweep(module, machine, "fp32"), emit_softmax(module, machine), emit_mix(module, machine, "fp32"))


def score_floats(rows: int, keys: int) -> int:
    """fp32 numbers that `rows` rows of scores for at most `keys` keys take."""
    return rows * (keys + 2 * SCORE_LANES)


def emit_score_row(code: Code, keys: V) -> V:
    """Bytes of a row of scores."""
    lines = code.b.sdiv(code.b.add(keys, code.whole(SCORE_LANES - 1)), code.whole(SCORE_LANES))
    return code.b.mul(code.b.or_(lines, code.whole(1)), code.whole(4 * SCORE_LANES))


def emit_softmax(module: ir.Module, machine: Machine) -> Code:
    """Emit softmax(scores, score_row, first, end, rows, sinks, scaling, softcap): scores to weights, in place.

    Keys outside first..end get weight 0. sinks: one more logit for each row, which takes part in the sum alone; 0 for none.
    """
    code = Code(module, machine, "softmax", [ADDRESS, I64, I64, I64, I64, ADDRESS, F32, F32], internal=True)
    scores, score_row, first, end, rows, sinks, scaling, softcap = code.arguments
    b, width, zero, four = code.b, code.width, code.whole(0), code.whole(4)
    padded = b.sdiv(score_row, four)

    def one_row(index: V) -> None:
        row = code.row(scores, index, score_row)

        def change(by: Callable[[V], V]) -> None:
            def one(i: V) -> None:
                place = code.row(row, i, four)
                code.store(by(code.load(F32, place, width)), place)

            code.each(zero, padded, width, one)

        factor, cap = code.splat(scaling, width), code.splat(softcap, width)
        change(lambda x: b.fmul(x, factor))
        with code.when(b.fcmp_ordered(">", softcap, code.real(0.0))):
            change(lambda x: b.fmul(cap, tanh(code, b.fdiv(x, cap))))
        for start, stop in ((zero, first), (end, padded)):
            code.each(start, stop, 1, lambda i: code.store(code.real(float("-inf")), code.row(row, i, four)))
        most = code.loop(zero, padded, width, [code.real(float("-inf"), width)], lambda i, best: [
            code.larger(code.load(F32, code.row(row, i, four), width), best[0])
        ])[0]  # fmt: skip
        has_sink = b.icmp_unsigned("!=", sinks, ir.Constant(ADDRESS, None))
        sink = code.loop(zero, b.select(has_sink, code.whole(1), zero), 1, [code.real(float("-inf"))], lambda _, none: [
            code.load(F32, code.row(sinks, index, four))
        ])[0]  # fmt: skip
        top = code.splat(code.larger(code.fold(most, code.larger), sink), width)

        def weigh(i: V, sums: list[V]) -> list[V]:
            place = code.row(row, i, four)
            weight = exp_of_negative(code, b.fsub(code.load(F32, place, width), top))
            code.store(weight, place)
            return [b.fadd(sums[0], weight)]

        total = code.fold(code.loop(zero, padded, width, [code.real(0.0, width)], weigh)[0], b.fadd)
        beside = code.lane(exp_of_negative(code, b.fsub(code.splat(sink, width), top)), 0)
        share = code.splat(b.fdiv(code.real(1.0), b.fadd(total, beside)), width)
        change(lambda x: b.fmul(x, share))

    code.each(zero, rows, 1, one_row)
    return code.end()


def emit_mix(module: ir.Module, machine: Machine, format_name: str) -> Code:
    """Emit mix(weights, weight_row, group, values, value_row, count, out, out_row, dim): out[g] += sum of weights[g, t] * values[t], values
    in a format without blocks."""
    code = Code(module, machine, "mix", [ADDRESS, I64, I64, ADDRESS, I64, I64, ADDRESS, I64, I64], internal=True)
    weights, weight_row, group, values, value_row, count, out, out_row, dim = code.arguments
    b, four, element = code.b, code.whole(4), code.whole(FORMATS[format_name].block_bytes)
    most = 4 if code.width == 16 else 2

    def heads(first: V, size: int) -> None:
        weight_rows, out_rows = Rows(weights, weight_row).beginning(code, first), Rows(out, out_row).beginning(code, first)

        def columns(start: V, vectors: int, width: int | None) -> None:
            places = [b.add(start, code.whole(i * code.width)) for i in range(vectors)]

            def key(t: V, sums: list[V]) -> list[V]:
                line = code.row(values, t, value_row)
                parts = [load_plain(code, format_name, code.row(line, place, element), width) for place in places]
                scales = [code.splat(code.load(F32, code.row(weight_rows.at(code, g), t, four)), width) for g in range(size)]
                return [code.fma(scales[n // vectors], parts[n % vectors], total) for n, total in enumerate(sums)]

            totals = code.loop(code.whole(0), count, 1, [code.real(0.0, width)] * (size * vectors), key)
            for n, total in enumerate(totals):
                place = code.row(out_rows.at(code, n // vectors), places[n % vectors], four)
                code.store(b.fadd(code.load(F32, place, width), total), place)

        start = code.whole(0)
        for vectors in (v for v in (4, 2, 1) if v <= most):
            step = vectors * code.width
            end = b.sub(dim, b.srem(b.sub(dim, start), code.whole(step)))
            code.each(start, end, step, lambda at, vectors=vectors: columns(at, vectors, code.width))  # type: ignore[misc]
            start = end
        code.each(start, dim, 1, lambda at: columns(at, 1, None))

    first = code.whole(0)
    for size in GROUP_SIZES:
        end = b.sub(group, b.srem(b.sub(group, first), code.whole(size)))
        code.each(first, end, size, lambda at, size=size: heads(at, size))  # type: ignore[misc]
        first = end
    return code.end()
