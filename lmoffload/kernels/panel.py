"""Emit sums over quantized lines: what scores over keys and sums over values have in common.

A panel is lines of 32 numbers one after another, each with its scale and zero (`codec`). Keys are panels of 32 tokens, whose lines are
channels; values are panels of 32 channels, whose lines are tokens. So the lanes of a vector are never summed up, scales meet the
coefficients and not the codes, and codes only become fp32 in registers.
"""

from __future__ import annotations

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I64, Code, Machine, V
from lmoffload.kernels.codec import LINE_ELEMENTS, Codec, load_codes, load_parameters
from lmoffload.kernels.dots import Rows

VECTORS = 2
"""Vectors of a line that are summed at once."""

CHAINS = 8
"""Sums that must be under way at once for the multipliers to be busy: few rows take several lines in turn, each with a sum of its own."""


def group_sizes(width: int) -> tuple[int, ...]:
    """Rows of coefficients that meet a line while it is in registers."""
    return (8, 4, 2, 1) if width == 16 else (4, 2, 1)


def emit_panel(module: ir.Module, machine: Machine, codec: Codec) -> Code:
    """Emit panel(codes, parameters, count, x, x_row, group, out, out_row, coefficients): out[g, lane] += sum over lines of
    x[g, line] * scale[line] * (code[line, lane] + zero[line]).

    coefficients: fp32 [group, count] of scratch. x and coefficients are fp32; *_row: bytes from a row to the next.
    """
    parameters = [ADDRESS, ADDRESS, I64, ADDRESS, I64, I64, ADDRESS, I64, ADDRESS]
    code = Code(module, machine, f"panel_{codec.line_bytes}", parameters, internal=True)
    codes, stored, count, x, x_row, group, out, out_row, scratch = code.arguments
    b, four = code.b, code.whole(4)
    coefficient_row = b.mul(count, four)
    whole = b.sub(count, b.srem(count, code.whole(code.width)))

    def scale_row(g: V) -> None:
        source, target = code.row(x, g, x_row), code.row(scratch, g, coefficient_row)

        def some(line: V, total: V, width: int | None) -> V:
            offset = b.mul(line, four)
            scales, zeros = load_parameters(code, code.at(stored, offset), width)
            scaled = b.fmul(code.load(F32, code.at(source, offset), width), scales)
            code.store(scaled, code.at(target, offset))
            return code.fma(scaled, zeros, total)

        lanes = code.loop(code.whole(0), whole, code.width, [code.real(0.0, code.width)], lambda i, s: [some(i, s[0], code.width)])
        shift = code.fold(lanes[0], b.fadd)
        shift = code.loop(whole, count, 1, [shift], lambda i, s: [some(i, s[0], None)])[0]
        place = code.row(out, g, out_row)
        for start in range(0, LINE_ELEMENTS, code.width):
            here = code.at(place, 4 * start)
            code.store(b.fadd(code.load(F32, here, code.width), code.splat(shift, code.width)), here)

    def add_rows(first: V, size: int, lane: int) -> None:
        rows = Rows(scratch, coefficient_row).beginning(code, first)
        places = [rows.at(code, g) for g in range(size)]
        chains = max(1, CHAINS // (size * VECTORS))

        def lines(line: V, sums: list[V], number: int) -> list[V]:
            for chain in range(number):
                at = b.add(line, code.whole(chain))
                address, offset = code.row(codes, at, code.whole(codec.line_bytes)), b.mul(at, four)
                vectors = [load_codes(code, codec, address, lane + i * code.width) for i in range(VECTORS)]
                scales = [code.splat(code.load(F32, code.at(place, offset)), code.width) for place in places]
                base = chain * size * VECTORS
                for n in range(size * VECTORS):
                    sums[base + n] = code.fma(scales[n // VECTORS], vectors[n % VECTORS], sums[base + n])
            return sums

        zero = [code.real(0.0, code.width)] * (size * VECTORS)
        end = b.sub(count, b.srem(count, code.whole(chains)))
        sums = code.loop(code.whole(0), end, chains, zero * chains, lambda i, s: lines(i, s, chains))
        if chains > 1:
            first_chain = code.loop(end, count, 1, sums[: len(zero)], lambda i, s: lines(i, s, 1))
            sums = first_chain + sums[len(zero) :]
            while len(sums) > len(zero):
                half = len(sums) // 2
                sums = [b.fadd(one, two) for one, two in zip(sums[:half], sums[half:], strict=True)]
        targets = Rows(out, out_row).beginning(code, first)
        for n, total in enumerate(sums):
            place = code.at(targets.at(code, n // VECTORS), 4 * (lane + n % VECTORS * code.width))
            code.store(b.fadd(code.load(F32, place, code.width), total), place)

    code.each(code.whole(0), group, 1, scale_row)
    first = code.whole(0)
    for size in group_sizes(code.width):
        end = b.sub(group, b.srem(b.sub(group, first), code.whole(size)))
        for lane in range(0, LINE_ELEMENTS, VECTORS * code.width):
            code.each(first, end, size, lambda at, size=size, lane=lane: add_rows(at, size, lane))  # type: ignore[misc]
        first = end
    return code.end()
