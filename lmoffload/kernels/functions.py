"""Emit exp and tanh on vectors."""

from __future__ import annotations

from llvmlite import ir

from lmoffload.kernels.code import F32, I32, Code, V

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Cephes' expf (https://www.netlib.org/cephes/): exp(x) = 2^n (1 + r + r^2 P(r)), n = round(x / ln 2), r = x - n ln 2."""

_ROUNDING = 12582912.0
"""1.5 * 2^23: a sum with it has no fraction bits left, and its low bits hold the whole number."""

_LEAST_EXPONENT = -87.0


def exp_of_negative(code: Code, x: V) -> V:
    """exp(x) for x <= 0 within 2 units in the last place; exactly 0 below -87; NaN stays NaN."""
    b, width = code.b, x.type.count
    shifted = code.fma(x, code.real(_LOG2_E, width), code.real(_ROUNDING, width))
    n = b.fsub(shifted, code.real(_ROUNDING, width))
    r = code.fma(n, code.real(-_LN2_LOW, width), code.fma(n, code.real(-_LN2_HIGH, width), x))
    total = code.real(_EXP_TERMS[0], width)
    for term in _EXP_TERMS[1:]:
        total = code.fma(total, r, code.real(term, width))
    total = b.fadd(code.fma(b.fmul(r, r), total, r), code.real(1.0, width))
    exponent = b.shl(b.add(b.bitcast(shifted, ir.VectorType(I32, width)), code.bits(127, width)), code.bits(23, width))
    scaled = b.fmul(total, b.bitcast(exponent, ir.VectorType(F32, width)))
    return b.select(b.fcmp_ordered("<", x, code.real(_LEAST_EXPONENT, width)), code.real(0.0, width), scaled)


def tanh(code: Code, x: V) -> V:
    """tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), within 2e-7."""
    b, width = code.b, x.type.count
    size = code.intrinsic("llvm.fabs", x)
    e = exp_of_negative(code, b.fmul(size, code.real(-2.0, width)))
    one = code.real(1.0, width)
    return code.intrinsic("llvm.copysign", b.fdiv(b.fsub(one, e), b.fadd(one, e)), x)
