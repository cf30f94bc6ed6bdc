"""Emit loads of GGUF's K-quants: blocks of 256 columns, whose sub-blocks of 16 or 32 have scales of their own within the block's.

ggml-common.h and `dequantize_row_*` of https://github.com/ggml-org/ggml say what the bytes mean. In every format a step of 32 columns takes
its low bits from 32 bytes in a row, all shifted alike. The scales of a block are unpacked together, as vectors, to scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llvmlite import ir

from lmoffload.kernels.code import F32, I8, I16, I32, Code, V
from lmoffload.kernels.halves import widen_fp16

BLOCK = 256
STEP = 32
STEPS = BLOCK // STEP
MOST_SCALES = 16
SCRATCH_BYTES = 2 * 4 * MOST_SCALES
"""Scratch of a block: fp32 scales, then fp32 minima."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of a block lie, in bytes, and what a code is made of."""

    scale: int
    """fp16 scale of the block."""
    least: int | None
    """fp16 scale of the minima, or None."""
    scales: int
    """The sub-blocks' scales."""
    num_scales: int
    low: int
    """The low bits of the codes."""
    low_bits: int
    high: int | None = None
    """The high bits of the codes, or None."""
    high_bits: int = 0
    offset: int = 0
    """Subtracted from every code."""


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "q2_k": Layout(80, 82, 0, 16, 16, 2),
        "q3_k": Layout(108, None, 96, 16, 32, 2, 0, 1, 4),
        "q4_k": Layout(0, 2, 4, 8, 16, 4),
        "q5_k": Layout(0, 2, 4, 8, 48, 4, 16, 1),
        "q6_k": Layout(208, None, 192, 16, 0, 4, 128, 2, 32),
    }
)


def unpack_scales(code: Code, format_name: str, block: V, scratch: V) -> None:
    """Write the sub-blocks' scales and minima, times the block's and exact in fp32, to `scratch`."""
    layout = LAYOUTS[format_name]
    scales, minima = _whole_scales(code, format_name, block)
    places = [(scales, layout.scale, 0)]
    if minima is not None and layout.least is not None:
        places.append((minima, layout.least, 4 * MOST_SCALES))
    for whole, place, target in places:
        half = widen_fp16(code, code.load(I16, code.at(block, place)), None)
        reals = code.b.sitofp(whole, ir.VectorType(F32, layout.num_scales))
        code.store(code.b.fmul(reals, code.splat(half, layout.num_scales)), code.at(scratch, target))


def load_k_step(code: Code, format_name: str, block: V, place: V, scratch: V) -> list[V]:
    """32 columns from 32 · `place` of a block whose scales have been unpacked, as vectors of the machine's width.

    A weight is scale · code − minimum: the product is exact in fp32, so that it is rounded once.
    """
    layout, width, b = LAYOUTS[format_name], code.width, code.b
    reals, per_step = ir.VectorType(F32, width), layout.num_scales // STEPS
    index = b.mul(place, code.whole(per_step))
    found = []
    for start in range(0, STEP, width):
        codes = _low(code, format_name, block, place, start)
        if layout.high is not None:
            codes = b.or_(codes, b.shl(_high(code, layout, block, place, start), code.bits(layout.low_bits, width)))
        if layout.offset:
            codes = b.sub(codes, code.bits(layout.offset, width))
        here = code.at(code.row(scratch, index, code.whole(4)), 4 * (start * per_step // STEP))
        wide = b.fmul(code.splat(code.load(F32, here), width), b.sitofp(codes, reals))
        if layout.least is not None:
            wide = b.fsub(wide, code.splat(code.load(F32, code.at(here, 4 * MOST_SCALES)), width))
        found.append(wide)
    return found


def _bytes(code: Code, block: V, first: V | int, start: int, shift: V, mask: int) -> V:
    """`width` codes out of bytes from `first` + `start` of the block."""
    width = code.width
    raw = code.load(I8, code.at(code.at(block, first), start), width)
    shifts = code.splat(code.b.trunc(shift, I32), width)
    return code.b.and_(code.b.lshr(code.b.zext(raw, ir.VectorType(I32, width)), shifts), code.bits(mask, width))


def _low(code: Code, format_name: str, block: V, place: V, start: int) -> V:
    """2-bit codes: 4 steps share 32 bytes. 4-bit codes: 2 steps do; those of q6_k are 2 apart."""
    b, layout = code.b, LAYOUTS[format_name]
    if layout.low_bits == 2:
        group, shift = b.lshr(place, code.whole(2)), b.shl(b.and_(place, code.whole(3)), code.whole(1))
    elif format_name == "q6_k":
        group = b.or_(b.shl(b.lshr(place, code.whole(2)), code.whole(1)), b.and_(place, code.whole(1)))
        shift = b.shl(b.and_(b.lshr(place, code.whole(1)), code.whole(1)), code.whole(2))
    else:
        group, shift = b.lshr(place, code.whole(1)), b.shl(b.and_(place, code.whole(1)), code.whole(2))
    first = b.add(b.shl(group, code.whole(5)), code.whole(layout.low))
    return _bytes(code, block, first, start, shift, (1 << layout.low_bits) - 1)


def _high(code: Code, layout: Layout, block: V, place: V, start: int) -> V:
    """1 bit: all 8 steps share 32 bytes; 2 bits: 4 steps do."""
    b = code.b
    assert layout.high is not None
    if layout.high_bits == 1:
        return _bytes(code, block, layout.high, start, place, 1)
    first = b.add(b.shl(b.lshr(place, code.whole(2)), code.whole(5)), code.whole(layout.high))
    return _bytes(code, block, first, start, b.shl(b.and_(place, code.whole(3)), code.whole(1)), 3)


def _whole_scales(code: Code, format_name: str, block: V) -> tuple[V, V | None]:
    """The sub-blocks' scales and minima as whole numbers."""
    b = code.b

    def loaded(offset: int, count: int, *, signed: bool = False) -> V:
        raw = code.load(I8, code.at(block, LAYOUTS[format_name].scales + offset), count)
        return (b.sext if signed else b.zext)(raw, ir.VectorType(I32, count))

    def bits(vector: V, shift: int, mask: int) -> V:
        count = vector.type.count
        return b.and_(b.lshr(vector, code.bits(shift, count)), code.bits(mask, count))

    def joined(*parts: V) -> V:
        whole = parts[0]
        for part in parts[1:]:
            count = whole.type.count
            widened = code.lanes(part, None, [i % part.type.count for i in range(count)])
            whole = code.lanes(whole, widened, [*range(count), *range(count, count + part.type.count)])
        return whole

    if format_name == "q6_k":
        return loaded(0, 16, signed=True), None
    if format_name == "q2_k":
        both = loaded(0, 16)
        return bits(both, 0, 15), bits(both, 4, 15)
    if format_name == "q3_k":  # 6 bits with 32 added: the low 4 in halves of 8 bytes, the high 2 in quarters of 4
        low, high = loaded(0, 8), loaded(8, 4)
        tops = joined(*(bits(high, shift, 3) for shift in (0, 2, 4, 6)))
        whole = b.or_(joined(bits(low, 0, 15), bits(low, 4, 15)), b.shl(tops, code.bits(4, 16)))
        return b.sub(whole, code.bits(32, 16)), None
    # 6 bits each: those of sub-blocks 0 to 3 whole in 4 bytes, whose upper 2 bits belong to 4 to 7, whose low 4 bits lie in 4 bytes more
    scales, minima, rest = (loaded(4 * i, 4) for i in range(3))
    late = [b.or_(bits(rest, shift, 15), b.shl(bits(one, 6, 3), code.bits(4, 4))) for shift, one in ((0, scales), (4, minima))]
    return joined(bits(scales, 0, 63), late[0]), joined(bits(minima, 0, 63), late[1])
