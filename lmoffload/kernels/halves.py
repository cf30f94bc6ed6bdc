"""Emit fp16 numbers as fp32, exactly."""

from __future__ import annotations

from llvmlite import ir

from lmoffload.kernels.code import F32, I32, Code, V


def widen_fp16(code: Code, half: V, width: int | None) -> V:
    """fp16 bits to fp32, exactly; by whole-number arithmetic where the machine has no instruction for it."""
    b, reals = code.b, vector_kind(F32, width)
    if code.halves:
        return b.fpext(b.bitcast(half, vector_kind(ir.HalfType(), width)), reals)
    bits = b.zext(half, vector_kind(I32, width))
    size = b.and_(bits, code.bits(0x7FFF, width))
    rebias = code.bits((127 - 15) << 23, width)
    normal = b.add(b.shl(size, code.bits(13, width)), rebias)
    infinite = b.icmp_unsigned(">=", size, code.bits(0x7C00, width))
    large = b.select(infinite, b.add(normal, rebias), normal)
    subnormal = b.bitcast(b.fmul(b.sitofp(size, reals), code.real(2.0**-24, width)), vector_kind(I32, width))
    magnitude = b.select(b.icmp_unsigned("<", size, code.bits(0x400, width)), subnormal, large)
    return b.bitcast(b.or_(magnitude, b.shl(b.and_(bits, code.bits(0x8000, width)), code.bits(16, width))), reals)


def vector_kind(scalar: ir.Type, width: int | None) -> ir.Type:
    return scalar if width is None else ir.VectorType(scalar, width)
