"""Emit loads of weights in every stored format as fp32 vectors.

Columns come in steps of 32, the block of the simpler GGUF formats; `matrix.reference_widen` says what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from llvmlite import ir

from lmoffload.kernels.code import F32, I8, I16, I32, Code, V
from lmoffload.kernels.halves import vector_kind, widen_fp16
from lmoffload.kernels.k_quants import LAYOUTS, SCRATCH_BYTES, STEP, STEPS, load_k_step, unpack_scales
from lmoffload_solver.formats import FORMATS


@dataclass(frozen=True)
class Nibbles:
    """A block of 32 codes of 4 or 5 bits after its fp16 scale, and where no offset is subtracted its fp16 minimum."""

    low: int
    """Byte at which the low halves of the codes begin: byte i holds columns i and i + 16."""
    high: int | None
    """Byte at which the fifth bits begin, those of all columns in 32 bits."""
    offset: int
    """Subtracted from every code; 0 where there is a minimum."""


NIBBLES: Mapping[str, Nibbles] = MappingProxyType(
    {"q4_0": Nibbles(2, None, 8), "q4_1": Nibbles(4, None, 0), "q5_0": Nibbles(6, 2, 16), "q5_1": Nibbles(8, 4, 0)}
)


def walk_steps(
    code: Code,
    format_name: str,
    rows: Sequence[V],
    num_steps: V,
    carried: Sequence[V],
    body: Callable[[V, list[list[V]], list[V]], list[V]],
) -> list[V]:
    """for every step of 32 columns: carried = body(step, vectors of that step of each row, carried); the values carried out of it.

    Args:
        rows: where rows of weights begin, each on a block.
        num_steps: a whole number of blocks.
    """
    fmt = FORMATS[format_name]
    if format_name not in LAYOUTS:

        def step_of_rows(step: V, carried: list[V]) -> list[V]:
            offset = code.b.mul(step, code.whole(STEP // fmt.block_elements * fmt.block_bytes))
            return body(step, [load_step(code, format_name, code.at(row, offset)) for row in rows], carried)

        return code.loop(code.whole(0), num_steps, 1, carried, step_of_rows)
    scratches = [code.scratch(SCRATCH_BYTES) for _ in rows]

    def block_of_rows(index: V, carried: list[V]) -> list[V]:
        blocks = [code.row(row, index, code.whole(fmt.block_bytes)) for row in rows]
        for block, scratch in zip(blocks, scratches, strict=True):
            unpack_scales(code, format_name, block, scratch)

        def step_of_blocks(place: V, carried: list[V]) -> list[V]:
            wide = [load_k_step(code, format_name, block, place, scratch) for block, scratch in zip(blocks, scratches, strict=True)]
            return body(code.b.add(code.b.mul(index, code.whole(STEPS)), place), wide, carried)

        return code.loop(code.whole(0), code.whole(STEPS), 1, carried, step_of_blocks)

    return code.loop(code.whole(0), code.b.sdiv(num_steps, code.whole(STEPS)), 1, carried, block_of_rows)


def load_step(code: Code, format_name: str, address: V) -> list[V]:
    """32 columns from `address` of a format of smaller blocks, as vectors of the machine's width."""
    fmt = FORMATS[format_name]
    if format_name in NIBBLES:
        return _load_nibbles(code, format_name, address)
    width = code.width
    starts = range(0, STEP, width)
    if format_name == "q8_0":
        scale = code.splat(widen_fp16(code, code.load(I16, address), None), width)
        codes = [code.load(I8, code.at(address, 2 + start), width) for start in starts]
        return [code.b.fmul(scale, code.b.sitofp(code.b.sext(c, ir.VectorType(I32, width)), ir.VectorType(F32, width))) for c in codes]
    return [load_plain(code, format_name, code.at(address, start * fmt.block_bytes), width) for start in starts]


def load_plain(code: Code, format_name: str, address: V, width: int | None) -> V:
    """`width` columns (None: one, as a scalar) of a format without blocks."""
    if format_name == "fp32":
        return code.load(F32, address, width)
    half = code.load(I16, address, width)
    if format_name == "fp16":
        return widen_fp16(code, half, width)
    assert format_name == "bf16", f"no code loads {format_name}"
    return code.b.bitcast(code.b.shl(code.b.zext(half, vector_kind(I32, width)), code.bits(16, width)), vector_kind(F32, width))


def _load_nibbles(code: Code, format_name: str, address: V) -> list[V]:
    width, layout = code.width, NIBBLES[format_name]
    b, ints, reals = code.b, ir.VectorType(I32, width), ir.VectorType(F32, width)
    scale = code.splat(widen_fp16(code, code.load(I16, address), None), width)
    packed = [b.zext(code.load(I8, code.at(address, layout.low + offset), width), ints) for offset in range(0, STEP // 2, width)]
    codes = [b.and_(p, code.bits(15, width)) for p in packed] + [b.lshr(p, code.bits(4, width)) for p in packed]
    if layout.high is not None:
        bits = code.splat(code.load(I32, code.at(address, layout.high)), width)
        for i, part in enumerate(codes):
            places = ir.Constant(ints, list(range(i * width, (i + 1) * width)))
            codes[i] = b.or_(part, b.shl(b.and_(b.lshr(bits, places), code.bits(1, width)), code.bits(4, width)))
    if layout.offset:
        return [b.fmul(scale, b.sitofp(b.sub(c, code.bits(layout.offset, width)), reals)) for c in codes]
    least = code.splat(widen_fp16(code, code.load(I16, code.at(address, 2)), None), width)
    return [code.fma(scale, b.sitofp(c, reals), least) for c in codes]  # scale * code is exact in fp32, so fused or not is the same
