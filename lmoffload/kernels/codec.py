"""Quantized lines of keys and values: 32 numbers, a scale and a zero.

A line is x = scale * (code + zero): codes of 8 bits, -128..127 (`int8`), or of 4, 0..15 (`int4-g32`); scale is a bf16, zero an int16. With
low and high the least and largest of the line,

    scale = max((high - low) / levels, max |x| / 2^14) rounded up to bf16, with 255 or 15 levels,
    zero = round(low / scale) - least code, code = round(x / scale) - zero.

So a number is off by at most half the scale (and 2^-8 of it by rounding), zero itself and a line of zeros are exact, and there is no number
of fp32 that the format cannot scale. A line that holds a NaN or an infinity has the scale NaN; one whose largest number is below 2^-100
counts as zeros.

In memory: the codes of a line, 32 bytes, or 16 of which byte i holds numbers i and i + 16; and a parameter of 4 bytes, scale in the low
half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I8, I32, I64, Code, Compiled, Machine, V, host_machine
from lmoffload.kernels.pool import Pool
from lmoffload_solver.formats import LINE_ELEMENTS, PARAMETER_BYTES

ROUNDING = 1.5 * 2.0**23
"""Added to a number below 2^21, it leaves the nearest whole number in the low bits."""

SMALLEST_SHARE = 2.0**-14
"""A scale is at least this share of the largest number, so that zero fits 16 bits."""

INFINITY_BITS, LEAST_BITS, NAN_BITS = 0x7F800000, (127 - 100) << 23, 0x7FC00000
"""The bits of infinity, 2^-100 and NaN."""

LINES_PER_JOB = 4096


@dataclass(frozen=True)
class Codec:
    """How the codes of a line are stored."""

    name: str
    line_bytes: int
    least_code: int
    most_code: int

    @property
    def levels(self) -> int:
        return self.most_code - self.least_code


CODECS = {codec.name: codec for codec in (Codec("int8", 32, -128, 127), Codec("int4-g32", 16, 0, 15))}


def load_codes(code: Code, codec: Codec, address: V, first_lane: int) -> V:
    """Codes of a line from `first_lane` on, a vector of the machine's width, as fp32."""
    b, width = code.b, code.width
    ints, reals = ir.VectorType(I32, width), ir.VectorType(F32, width)
    if codec.line_bytes == LINE_ELEMENTS:
        return b.sitofp(b.sext(code.load(I8, code.at(address, first_lane), width), ints), reals)
    half = LINE_ELEMENTS // 2
    packed = b.zext(code.load(I8, code.at(address, first_lane % half), width), ints)
    found = b.and_(packed, code.bits(15, width)) if first_lane < half else b.lshr(packed, code.bits(4, width))
    return b.sitofp(found, reals)


def load_parameters(code: Code, address: V, width: int | None) -> tuple[V, V]:
    """(scales, zeros) of `width` lines, or of one, as fp32."""
    b, reals = code.b, F32 if width is None else ir.VectorType(F32, width)
    both, shift = code.load(I32, address, width), code.bits(16, width)
    return b.bitcast(b.shl(both, shift), reals), b.sitofp(b.ashr(both, shift), reals)


def emit_encode(module: ir.Module, machine: Machine, codec: Codec) -> Code:
    """Emit encode(x, first, end, target, code_places, parameter_places): lines first..end of x, fp32 [lines, 32], to their places."""
    one = emit_encode_line(module, machine, codec)
    code = Code(module, machine, "encode", [ADDRESS, I64, I64, ADDRESS, ADDRESS, ADDRESS])
    x, first, end, target, code_places, parameter_places = code.arguments

    def line(index: V) -> None:
        places = [code.at(target, code.load(I64, code.row(table, index, code.whole(8)))) for table in (code_places, parameter_places)]
        code.call(one, code.row(x, index, code.whole(4 * LINE_ELEMENTS)), *places)

    code.each(first, end, 1, line)
    return code.end()


def emit_encode_line(module: ir.Module, machine: Machine, codec: Codec) -> Code:
    """Emit encode_line(line, codes, parameter): fp32 [32] to where its codes and its parameter lie."""
    code = Code(module, machine, f"encode_line_{codec.line_bytes}", [ADDRESS, ADDRESS, ADDRESS], internal=True)
    source, target, parameter_place = code.arguments
    b, width = code.b, code.width
    parts = [code.load(F32, code.at(source, 4 * start), width) for start in range(0, LINE_ELEMENTS, width)]
    inverse, zero, parameter = _parameter(code, codec, parts)
    many, shift = code.splat(inverse, width), code.splat(zero, width)
    codes = [b.sub(_rounded(code, b.fmul(part, many)), shift) for part in parts]
    least, most = code.bits(codec.least_code, width), code.bits(codec.most_code, width)
    codes = [_larger(code, _smaller(code, found, most), least) for found in codes]
    if codec.line_bytes < LINE_ELEMENTS:
        half = len(codes) // 2
        codes = [b.or_(low, b.shl(high, code.bits(4, width))) for low, high in zip(codes[:half], codes[half:], strict=True)]
    for number, found in enumerate(codes):
        code.store(b.trunc(found, ir.VectorType(I8, width)), code.at(target, number * width))
    code.store(parameter, parameter_place)
    return code.end()


def _parameter(code: Code, codec: Codec, parts: list[V]) -> tuple[V, V, V]:
    """(1 / scale, zero, the stored parameter) of a line. The bits of |x| are in order as whole numbers, NaN above infinity."""
    b, width = code.b, code.width
    sizes = [b.and_(b.bitcast(part, ir.VectorType(I32, width)), code.bits(0x7FFFFFFF, width)) for part in parts]
    top, low, high = sizes[0], parts[0], parts[0]
    for size, part in zip(sizes[1:], parts[1:], strict=True):
        top, low, high = _larger(code, size, top), b.select(b.fcmp_ordered("<", part, low), part, low), code.larger(part, high)
    top = code.fold(top, lambda one, two: _larger(code, one, two))
    low = code.fold(low, lambda one, two: b.select(b.fcmp_ordered("<", one, two), one, two))
    high = code.fold(high, code.larger)
    finite, large = b.icmp_signed("<", top, code.bits(INFINITY_BITS)), b.icmp_signed(">=", top, code.bits(LEAST_BITS))
    step, size = code.real(_step(codec)), b.bitcast(top, F32)
    wanted = code.larger(b.fsub(b.fmul(high, step), b.fmul(low, step)), b.fmul(size, code.real(SMALLEST_SHARE)))
    bits = b.and_(b.add(b.bitcast(wanted, I32), code.bits(0xFFFF)), code.bits(0xFFFF0000))
    bits = b.select(b.and_(finite, large), bits, code.bits(0))
    inverse = b.select(b.icmp_signed(">", bits, code.bits(0)), b.fdiv(code.real(1.0), b.bitcast(bits, F32)), code.real(0.0))
    start = b.select(finite, b.fmul(low, inverse), code.real(0.0))
    zero = b.sub(_rounded(code, start), code.bits(codec.least_code))
    stored = b.select(finite, bits, code.bits(NAN_BITS))
    return inverse, zero, b.or_(b.lshr(stored, code.bits(16)), b.shl(zero, code.bits(16)))


def _rounded(code: Code, value: V) -> V:
    """The nearest whole number to one below 2^21 in size."""
    b = code.b
    width = value.type.count if isinstance(value.type, ir.VectorType) else None
    kind = I32 if width is None else ir.VectorType(I32, width)
    moved = b.bitcast(b.fadd(value, code.real(ROUNDING, width)), kind)
    return b.ashr(b.shl(moved, code.bits(10, width)), code.bits(10, width))


def _larger(code: Code, one: V, two: V) -> V:
    return code.b.select(code.b.icmp_signed(">", one, two), one, two)


def _smaller(code: Code, one: V, two: V) -> V:
    return code.b.select(code.b.icmp_signed("<", one, two), one, two)


def _step(codec: Codec) -> float:
    return float(torch.tensor(1.0 / codec.levels, dtype=torch.float32))


@cache
def encoder(name: str) -> Callable[..., None]:
    """The compiled function of a format, compiled at the first call."""
    module = ir.Module(f"lmoffload_encode_{name}")
    encode = emit_encode(module, host_machine(), CODECS[name])
    return Compiled(module).function(encode)


def encode_lines(
    x: torch.Tensor, name: str, target: torch.Tensor, code_places: torch.Tensor, parameter_places: torch.Tensor, pool: Pool | None = None
) -> None:
    """Quantize lines and store each where it belongs.

    Args:
        x: fp32 [lines, 32] contiguous.
        name: a key of CODECS.
        target: uint8, one-dimensional.
        code_places, parameter_places: int64 [lines], bytes from the target's start.
        pool: who computes; the caller alone where None.
    """
    assert x.dtype == torch.float32 and x.is_contiguous() and x.shape[1] == LINE_ELEMENTS, "lines are fp32 and contiguous"
    assert code_places.dtype == parameter_places.dtype == torch.int64, "places are int64"
    if target.device.type != "cpu":
        store_encoded(x, name, target, code_places, parameter_places)
        return
    encode = encoder(name)
    count = x.shape[0]

    def some(first: int, end: int) -> None:
        addresses = target.data_ptr(), code_places.data_ptr(), parameter_places.data_ptr()
        encode(x.data_ptr(), first, end, *addresses)

    if pool is None or count < 2 * LINES_PER_JOB:
        some(0, count)
        return
    pool.run([lambda first=first: some(first, min(first + LINES_PER_JOB, count)) for first in range(0, count, LINES_PER_JOB)])  # type: ignore[misc]


def store_encoded(x: torch.Tensor, name: str, target: torch.Tensor, code_places: torch.Tensor, parameter_places: torch.Tensor) -> None:
    """`encode_lines` in plain torch, on any device; see there."""
    codes, parameters = reference_encode(x, name)
    packed, half = codes & 0xFF, LINE_ELEMENTS // 2
    if CODECS[name].line_bytes < LINE_ELEMENTS:
        packed = codes[:, :half] | codes[:, half:] << 4
    each, word = torch.arange(packed.shape[1], device=target.device), torch.arange(PARAMETER_BYTES, device=target.device)
    target[code_places.to(target.device)[:, None] + each] = packed.to(torch.uint8)
    target[parameter_places.to(target.device)[:, None] + word] = parameters.view(torch.uint8).view(-1, PARAMETER_BYTES)


def reference_encode(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int32 [lines, 32], parameters int32 [lines]) of lines fp32 [lines, 32], in plain torch."""
    codec = CODECS[name]
    low, high, size = x.amin(1), x.amax(1), x.abs().amax(1)
    finite = torch.isfinite(size)
    wanted = torch.maximum(high * _step(codec) - low * _step(codec), size * SMALLEST_SHARE)
    bits = (wanted.view(torch.int32) + 0xFFFF) & -0x10000
    bits = torch.where(finite & (size.view(torch.int32) >= LEAST_BITS), bits, 0)
    scale = bits.view(torch.float32)
    inverse = torch.where(scale > 0, 1 / scale, 0)
    zero = torch.where(finite, low * inverse, 0).round().to(torch.int32) - codec.least_code
    codes = ((x * inverse[:, None]).nan_to_num().round().to(torch.int32) - zero[:, None]).clamp(codec.least_code, codec.most_code)
    stored = torch.where(finite, bits, NAN_BITS)
    return codes, ((stored >> 16) & 0xFFFF) | (zero << 16)


def reference_decode(codes: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 32] of codes [..., 32] and parameters int32 [...]."""
    scale, zero = (parameters << 16).view(torch.float32), parameters >> 16
    return scale[..., None] * (codes + zero[..., None]).float()


def unpack_codes(stored: torch.Tensor, name: str) -> torch.Tensor:
    """int32 [..., 32] of stored codes, uint8 [..., line_bytes]."""
    if CODECS[name].line_bytes == LINE_ELEMENTS:
        return stored.contiguous().view(torch.int8).int()
    return torch.cat((stored & 15, stored >> 4), dim=-1).int()


__all__ = [
    "CODECS",
    "LINE_ELEMENTS",
    "PARAMETER_BYTES",
    "Codec",
    "encode_lines",
    "encoder",
    "reference_decode",
    "reference_encode",
    "store_encoded",
    "unpack_codes",
]
