"""Emit loads of weights in every stored format as fp32 vectors.

Columns come in steps of 32, the block of the GGUF formats; `matrix.reference_widen` says what the bytes mean.
"""

from __future__ import annotations

from llvmlite import ir

from lmoffload.kernels.code import F32, I8, I16, I32, Code, V
from lmoffload_solver.formats import FORMATS

STEP = 32
"""Columns of one step."""


def step_bytes(format_name: str) -> int:
    """Stored bytes of 32 columns."""
    fmt = FORMATS[format_name]
    return STEP // fmt.block_elements * fmt.block_bytes


def load_step(code: Code, format_name: str, address: V) -> list[V]:
    """32 columns from `address` as vectors of the machine's width."""
    if format_name in ("q4_0", "q4_1"):
        return _load_nibbles(code, format_name, address)
    width = code.width
    starts = range(0, STEP, width)
    if format_name == "q8_0":
        scale = code.splat(widen_fp16(code, code.load(I16, address), None), width)
        codes = [code.load(I8, code.at(address, 2 + start), width) for start in starts]
        return [code.b.fmul(scale, code.b.sitofp(code.b.sext(c, ir.VectorType(I32, width)), ir.VectorType(F32, width))) for c in codes]
    size = step_bytes(format_name) // STEP
    return [load_plain(code, format_name, code.at(address, start * size), width) for start in starts]


def load_plain(code: Code, format_name: str, address: V, width: int | None) -> V:
    """`width` columns (None: one, as a scalar) of a format without blocks."""
    if format_name == "fp32":
        return code.load(F32, address, width)
    half = code.load(I16, address, width)
    if format_name == "fp16":
        return widen_fp16(code, half, width)
    assert format_name == "bf16", f"no code loads {format_name}"
    return code.b.bitcast(code.b.shl(code.b.zext(half, _kind(I32, width)), code.bits(16, width)), _kind(F32, width))


def _load_nibbles(code: Code, format_name: str, address: V) -> list[V]:
    width = code.width
    b, ints, reals = code.b, ir.VectorType(I32, width), ir.VectorType(F32, width)
    scale = code.splat(widen_fp16(code, code.load(I16, address), None), width)
    start = 4 if format_name == "q4_1" else 2
    packed = [b.zext(code.load(I8, code.at(address, start + offset), width), ints) for offset in range(0, STEP // 2, width)]
    codes = [b.and_(p, code.bits(15, width)) for p in packed] + [b.lshr(p, code.bits(4, width)) for p in packed]
    if format_name == "q4_0":
        return [b.fmul(scale, b.sitofp(b.sub(c, code.bits(8, width)), reals)) for c in codes]
    least = code.splat(widen_fp16(code, code.load(I16, code.at(address, 2)), None), width)
    return [code.fma(scale, b.sitofp(c, reals), least) for c in codes]  # scale * code is exact in fp32, so fused or not is the same


def widen_fp16(code: Code, half: V, width: int | None) -> V:
    """fp16 bits to fp32, exactly; by whole-number arithmetic where the machine has no instruction for it."""
    b, reals = code.b, _kind(F32, width)
    if code.halves:
        return b.fpext(b.bitcast(half, _kind(ir.HalfType(), width)), reals)
    bits = b.zext(half, _kind(I32, width))
    size = b.and_(bits, code.bits(0x7FFF, width))
    rebias = code.bits((127 - 15) << 23, width)
    normal = b.add(b.shl(size, code.bits(13, width)), rebias)
    infinite = b.icmp_unsigned(">=", size, code.bits(0x7C00, width))
    large = b.select(infinite, b.add(normal, rebias), normal)
    subnormal = b.bitcast(b.fmul(b.sitofp(size, reals), code.real(2.0**-24, width)), _kind(I32, width))
    magnitude = b.select(b.icmp_unsigned("<", size, code.bits(0x400, width)), subnormal, large)
    return b.bitcast(b.or_(magnitude, b.shl(b.and_(bits, code.bits(0x8000, width)), code.bits(16, width))), reals)


def _kind(scalar: ir.Type, width: int | None) -> ir.Type:
    return scalar if width is None else ir.VectorType(scalar, width)
