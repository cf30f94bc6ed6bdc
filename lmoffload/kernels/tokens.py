"""Emit the quantization of activations: every group of a row's columns to codes -127..127 and a scale.

Rows are packed in blocks of `sizes` rows, as many of the largest as there are, then smaller ones; or all in blocks of one size, of which
the last is then not full. A block of S rows holds, for every `run` of columns, S times the codes of a row; then for every group of columns
S sums of codes and S fp32 scales. A packed row takes `packed_row_bytes`, so that a block begins at its first row's number times that.

scale = max |x| / 127 over the group, code = x / scale rounded to the nearest: an activation's error is at most max |x| / 254. A single
huge activation, as trained models have, thus costs its group alone and not its row. A group that holds a NaN or an infinity has the scale
NaN; one whose largest number is below 2^-100 counts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from lmoffload.kernels.bytes_dot import SIGNED_SHIFT
from lmoffload.kernels.code import ADDRESS, F32, I8, I32, I64, Code, Machine, V

LARGEST_CODE = 127
ROUNDING = 1.5 * 2.0**23
"""Added to a number below 2^22, it leaves the nearest whole number in the low bits."""

INFINITY_BITS = 0x7F800000
LEAST_BITS = (127 - 100) << 23
"""The bits of 2^-100."""


def packed_row_bytes(k: int, group: int) -> int:
    """Bytes of one packed row of k columns."""
    return k + 8 * (k // group)


def each_block(code: Code, m: V, sizes: Sequence[int], body: Callable[[V, int], None]) -> None:
    """body(first row, size) for every block of m rows."""
    first = code.whole(0)
    for size in sizes:
        end = code.b.sub(m, code.b.srem(code.b.sub(m, first), code.whole(size)))
        code.each(first, end, size, lambda at, size=size: body(at, size))  # type: ignore[misc]
        first = end


def emit_pack(module: ir.Module, machine: Machine, group: int, sizes: Sequence[int], shifted: bool, real: bool, run: int = 4) -> Code:
    """Emit pack(x, x_row, m, target, packed_row, k).

    group: columns of a scale. run: columns of a row that lie together, 4 or whole vectors.
    shifted: sums are whole numbers, -128 times the codes' (`BytesDot.shifted`). real: sums are fp32, scaled.
    """
    code = Code(module, machine, "pack", [ADDRESS, I64, I64, ADDRESS, I64, I64])
    x, x_row, m, target, packed_row, k = code.arguments
    b, four = code.b, code.whole(4)

    def block(first: V, size: int) -> None:
        codes = code.row(target, first, packed_row)
        sums = code.row(codes, k, code.whole(size))

        def row(index: V) -> None:
            source, offset = code.row(x, b.add(first, index), x_row), b.mul(index, four)

            def one_group(g: V) -> None:
                begin, beside = b.mul(g, code.whole(group)), code.at(code.row(sums, g, code.whole(8 * size)), offset)
                inverse, scale = _scales(code, code.row(source, begin, four), group)
                code.store(scale, code.at(beside, 4 * size))

                def step(i: V, total: list[V]) -> list[V]:
                    column = b.add(begin, i)
                    found = _codes(code, code.load(F32, code.row(source, column, four), code.width), inverse)
                    narrow = b.trunc(found, ir.VectorType(I8, code.width))
                    if run > 4:
                        within = b.and_(column, code.whole(run - 1))
                        place = code.at(code.row(codes, b.sub(column, within), code.whole(size)), b.mul(index, code.whole(run)))
                        code.store(narrow, code.at(place, within))
                    else:
                        words = b.bitcast(narrow, ir.VectorType(I32, code.width // 4))
                        place = code.at(code.row(codes, column, code.whole(size)), offset)
                        for part in range(code.width // 4):
                            code.store(code.lane(words, part), code.at(place, 4 * size * part))
                    return [b.add(total[0], found)]

                lanes = code.loop(code.whole(0), code.whole(group), code.width, [code.bits(0, code.width)], step)[0]
                total = code.fold(lanes, b.add)
                if shifted:
                    total = b.mul(total, code.bits(-SIGNED_SHIFT))
                code.store(b.fmul(b.sitofp(total, F32), scale) if real else total, beside)

            code.each(code.whole(0), b.sdiv(k, code.whole(group)), 1, one_group)

        code.each(code.whole(0), code.least(code.whole(size), b.sub(m, first)), 1, row)

    if len(sizes) == 1:
        code.each(code.whole(0), m, sizes[0], lambda first: block(first, sizes[0]))
    else:
        each_block(code, m, sizes, block)
    return code.end()


def _scales(code: Code, source: V, group: int) -> tuple[V, V]:
    """(127 / max |x| in every lane, max |x| / 127). The bits of |x| are in order as whole numbers, NaN above infinity."""
    b, width = code.b, code.width
    sign = code.bits(0x7FFFFFFF, width)

    def larger(one: V, two: V) -> V:
        return b.select(b.icmp_signed(">", one, two), one, two)

    best = code.bits(0, width)
    for column in range(0, group, width):
        best = larger(best, b.and_(code.load(I32, code.at(source, 4 * column), width), sign))
    top = code.fold(best, larger)
    finite, large = b.icmp_signed("<", top, code.bits(INFINITY_BITS)), b.icmp_signed(">=", top, code.bits(LEAST_BITS))
    size = b.bitcast(top, F32)
    inverse = b.select(b.and_(finite, large), b.fdiv(code.real(LARGEST_CODE), size), code.real(0.0))
    scale = b.select(finite, b.select(large, b.fdiv(size, code.real(LARGEST_CODE)), code.real(0.0)), code.real(float("nan")))
    return code.splat(inverse, width), scale


def _codes(code: Code, values: V, inverse: V) -> V:
    """Codes as whole numbers; whatever they are where the scale is NaN."""
    b, width = code.b, code.width
    rounded = b.fadd(b.fmul(values, inverse), code.real(ROUNDING, width))
    bits = b.shl(b.bitcast(rounded, ir.VectorType(I32, width)), code.bits(24, width))
    return b.ashr(bits, code.bits(24, width))
