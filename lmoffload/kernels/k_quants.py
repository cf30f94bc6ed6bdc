"""Emit loads of GGUF's K-quants: blocks of 256 columns, whose sub-blocks of 16 or 32 have scales of their own within the block's.

A block is described by where its parts lie, in bytes; ggml-common.h and `dequantize_row_*` of https://github.com/ggml-org/ggml say what they
mean. In every format a step of 32 columns takes its low bits from 32 bytes in a row, all shifted alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llvmlite import ir

from lmoffload.kernels.code import F32, I8, I16, I32, Code, V
from lmoffload.kernels.halves import widen_fp16

STEP = 32


@dataclass(frozen=True)
class Layout:
    """Where the parts of a block lie, in bytes, and what a code is made of."""

    scale: int
    """fp16 scale of the block."""
    least: int | None
    """fp16 scale of the minima, or None."""
    scales: int
    """The sub-blocks' scales."""
    low: int
    """The low bits of the codes."""
    low_bits: int
    high: int | None
    """The high bits of the codes, or None."""
    high_bits: int
    offset: int
    """Subtracted from every code."""


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "q2_k": Layout(80, 82, 0, 16, 2, None, 0, 0),
        "q3_k": Layout(108, None, 96, 32, 2, 0, 1, 4),
        "q4_k": Layout(0, 2, 4, 16, 4, None, 0, 0),
        "q5_k": Layout(0, 2, 4, 48, 4, 16, 1, 0),
        "q6_k": Layout(208, None, 192, 0, 4, 128, 2, 32),
    }
)


def load_k_step(code: Code, format_name: str, block: V, place: V) -> list[V]:
    """32 columns from 32 · `place` of a block, as vectors of the machine's width."""
    return _Step(code, format_name, block, place).vectors()


@dataclass(frozen=True)
class _Step:
    code: Code
    format_name: str
    block: V
    place: V

    def vectors(self) -> list[V]:
        """A weight is scale · code − minimum: the product is exact in fp32, so that it is rounded once."""
        code, width = self.code, self.code.width
        reals, layout = ir.VectorType(F32, width), LAYOUTS[self.format_name]
        heads = [self._head(part) for part in (range(2) if self._halves else range(1))]
        found = []
        for start in range(0, STEP, width):
            codes = self._low(start)
            if layout.high is not None:
                high = code.b.shl(self._high(start), code.bits(layout.low_bits, width))
                codes = code.b.or_(codes, high)
            if layout.offset:
                codes = code.b.sub(codes, code.bits(layout.offset, width))
            scale, least = heads[start * len(heads) // STEP]
            wide = code.b.sitofp(codes, reals)
            scales = code.splat(scale, width)
            found.append(code.b.fmul(scales, wide) if least is None else code.b.fsub(code.b.fmul(scales, wide), code.splat(least, width)))
        return found

    @property
    def _halves(self) -> bool:
        """Whether every 16 columns have a scale of their own."""
        return self.format_name in ("q2_k", "q3_k", "q6_k")

    def _byte(self, offset: V) -> V:
        """A byte of the block as 32 bits without sign."""
        return self.code.b.zext(self.code.load(I8, self.code.at(self.block, offset)), I32)

    def _bytes(self, first: V | int, start: int, shift: V, mask: int) -> V:
        """`width` codes out of bytes from `first` + `start` of the block."""
        code, width = self.code, self.code.width
        ints = ir.VectorType(I32, width)
        raw = code.b.zext(code.load(I8, code.at(code.at(self.block, first), start), width), ints)
        shifts = code.splat(code.b.trunc(shift, I32), width)
        return code.b.and_(code.b.lshr(raw, shifts), code.bits(mask, width))

    def _low(self, start: int) -> V:
        """2-bit codes: 4 steps share 32 bytes. 4-bit codes: 2 steps do; of q6_k those are 2 apart."""
        code, b, place = self.code, self.code.b, self.place
        layout = LAYOUTS[self.format_name]
        if layout.low_bits == 2:
            group, shift = b.lshr(place, code.whole(2)), b.shl(b.and_(place, code.whole(3)), code.whole(1))
        elif self.format_name == "q6_k":
            group = b.or_(b.shl(b.lshr(place, code.whole(2)), code.whole(1)), b.and_(place, code.whole(1)))
            shift = b.shl(b.and_(b.lshr(place, code.whole(1)), code.whole(1)), code.whole(2))
        else:
            group, shift = b.lshr(place, code.whole(1)), b.shl(b.and_(place, code.whole(1)), code.whole(2))
        first = b.add(b.shl(group, code.whole(5)), code.whole(layout.low))
        return self._bytes(first, start, shift, (1 << layout.low_bits) - 1)

    def _high(self, start: int) -> V:
        """1 bit: all 8 steps share 32 bytes; 2 bits: 4 steps do."""
        code, b, layout = self.code, self.code.b, LAYOUTS[self.format_name]
        assert layout.high is not None
        if layout.high_bits == 1:
            return self._bytes(layout.high, start, self.place, 1)
        first = b.add(b.shl(b.lshr(self.place, code.whole(2)), code.whole(5)), code.whole(layout.high))
        return self._bytes(first, start, b.shl(b.and_(self.place, code.whole(3)), code.whole(1)), 3)

    def _head(self, part: int) -> tuple[V, V | None]:
        """Scale and minimum of a sub-block of the step, fp32: the block's times the sub-block's, exact."""
        code, layout = self.code, LAYOUTS[self.format_name]
        read: Mapping[str, Callable[[V], tuple[V, V | None]]] = {
            "q2_k": self._nibbles, "q3_k": self._six_bits_signed, "q4_k": self._six_bits, "q5_k": self._six_bits, "q6_k": self._byte_signed,
        }  # fmt: skip
        index = code.b.add(code.b.shl(self.place, code.whole(1)), code.whole(part)) if self._halves else self.place
        scale, least = read[self.format_name](index)
        return self._scaled(scale, layout.scale), None if least is None or layout.least is None else self._scaled(least, layout.least)

    def _scaled(self, whole: V, place: int) -> V:
        code = self.code
        half = code.load(I16, code.at(self.block, place))
        return code.b.fmul(widen_fp16(code, half, None), code.b.sitofp(whole, F32))

    def _nibbles(self, index: V) -> tuple[V, V | None]:
        both = self._byte(index)
        return self.code.b.and_(both, self.code.bits(15)), self.code.b.lshr(both, self.code.bits(4))

    def _byte_signed(self, index: V) -> tuple[V, V | None]:
        code = self.code
        address = code.at(code.at(self.block, LAYOUTS[self.format_name].scales), index)
        return code.b.sext(code.load(I8, address), I32), None

    def _six_bits(self, index: V) -> tuple[V, V | None]:
        """12 bytes of scales and minima, 6 bits each: the first four whole in bytes 0..3 and 4..7, whose upper bits are those of the
        last four, which have their lower ones in bytes 8..11."""
        code, b = self.code, self.code.b
        early = b.icmp_unsigned("<", index, code.whole(4))
        start = code.whole(LAYOUTS[self.format_name].scales)
        lane = b.add(b.and_(index, code.whole(3)), start)
        scale, least, both = (self._byte(b.add(lane, code.whole(4 * i))) for i in range(3))
        tops = [b.shl(b.lshr(one, code.bits(6)), code.bits(4)) for one in (scale, least)]
        late = b.or_(b.and_(both, code.bits(15)), tops[0]), b.or_(b.lshr(both, code.bits(4)), tops[1])
        firsts = [b.and_(one, code.bits(63)) for one in (scale, least)]
        return b.select(early, firsts[0], late[0]), b.select(early, firsts[1], late[1])

    def _six_bits_signed(self, index: V) -> tuple[V, V | None]:
        """12 bytes of 16 scales of 6 bits with 32 added: the low 4 bits in halves of bytes 0..7, the high 2 in quarters of 8..11."""
        code, b = self.code, self.code.b
        start = LAYOUTS[self.format_name].scales
        shift = b.trunc(b.shl(b.lshr(index, code.whole(3)), code.whole(2)), I32)
        low = b.and_(b.lshr(self._byte(b.add(b.and_(index, code.whole(7)), code.whole(start))), shift), code.bits(15))
        quarter = b.trunc(b.shl(b.lshr(index, code.whole(2)), code.whole(1)), I32)
        high = b.and_(b.lshr(self._byte(b.add(b.and_(index, code.whole(3)), code.whole(start + 8))), quarter), code.bits(3))
        return b.sub(b.or_(low, b.shl(high, code.bits(4))), code.bits(32)), None
