"""What lies between products, in one pass each, shared out over the pool: norms, gated activations, rotary embeddings, residual sums.

torch runs each of their operators over the whole of memory by one thread. Here too a row's bits depend on it alone: norms sum in a fixed
order, and the numbers of an activation do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise

import torch
from llvmlite import ir

from lmoffload.kernels.board import Call, emit_entry
from lmoffload.kernels.code import ADDRESS, F32, I64, Code, Compiled, V, host_machine
from lmoffload.kernels.functions import exp_of_negative
from lmoffload.kernels.pool import Pool

JOB_NUMBERS = 1 << 15
"""Numbers worth a job of their own: some 30 microseconds where they lie in memory."""

JOBS_PER_THREAD = 4


@dataclass(frozen=True)
class ElementwiseKernels:
    """Addresses of compiled functions for a `board.Call`; all numbers whole, strides in bytes.

    gate(gate, up, count): gate = silu(gate) * up, of `count` numbers.
    norm(x, x_row, rows, weight, out, out_row, k, eps): out[row] = weight * x[row] / sqrt(mean(x[row] ** 2) + eps). eps: fp32 [1].
    rotate(x, x_row, rows, heads, dim, cos, sin, cos_row): x[row, head] turned by half its size, as Llama's are.
    add(into, other, count): into += other.
    add_to_rows(into, rows, other, count): into[row] += other, rows of `count` numbers one after another.
    """

    gate: int
    norm: int
    rotate: int
    add: int
    add_to_rows: int
    code: Compiled


@cache
def elementwise_kernels() -> ElementwiseKernels:
    """The compiled functions, compiled at the first call."""
    module = ir.Module("lmoffload_elementwise")
    addition = emit_add(module)
    emitted = emit_gate(module), emit_norm(module), emit_rotate(module), addition, emit_add_to_rows(module, addition)
    entries = [emit_entry(code) for code in emitted]
    compiled = Compiled(module)
    gate, norm, rotation, add, add_to_rows = (compiled.address(entry) for entry in entries)
    return ElementwiseKernels(gate, norm, rotation, add, add_to_rows, compiled)


def silu_gate(gate: torch.Tensor, up: torch.Tensor, pool: Pool) -> torch.Tensor:
    """silu(gate) * up, written over gate; within 8 units in the last place of each number, or 1e-35.

    gate, up: fp32 of one shape, contiguous.
    """
    _pairwise(elementwise_kernels().gate, gate, up, pool)
    return gate


def add(into: torch.Tensor, other: torch.Tensor, pool: Pool) -> torch.Tensor:
    """into + other, written over into. Both fp32 of one shape; contiguous."""
    _pairwise(elementwise_kernels().add, into, other, pool)
    return into


def rotate(heads: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, pool: Pool) -> None:
    """Llama's rotary embedding, in place: x = x * cos + (-second half of x, first half) * sin; each number within 3 2^-24 of the sum of
    its parts' sizes.

    Args:
        heads: queries, keys, ...: fp32 [T, heads, D] contiguous, D even.
        cos, sin: fp32 [T, D] contiguous.
    """
    calls, dim, entry = list[Call](), cos.shape[-1], elementwise_kernels().rotate
    assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
    for x in heads:
        assert x.is_contiguous() and x.dtype == torch.float32 and x.shape[2] == dim
        row, size, places = 4 * x.shape[1] * dim, 4 * dim, (cos.data_ptr(), sin.data_ptr())
        for first, end in shares(x.shape[0], x.shape[1] * dim, pool):
            beside = *(place + first * size for place in places), size
            calls.append(Call(entry, (x.data_ptr() + first * row, row, end - first, x.shape[1], dim, *beside), (x, cos, sin)))
    pool.run(calls)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, pool: Pool) -> torch.Tensor:
    """weight * x / sqrt(mean(x ** 2) + eps) over the last dimension; each number within (K / 16 + 16) 2^-24 of its size.

    x: fp32 [..., K]; weight: fp32 [K]. Returns fp32 [..., K], contiguous.
    """
    k = x.shape[-1]
    assert x.dtype == weight.dtype == torch.float32 and weight.shape == (k,)
    x, weight = x.contiguous(), weight.contiguous()
    out, least = pool.empty(*x.shape), _real(eps)
    entry, from_place, to_place, row = elementwise_kernels().norm, x.data_ptr(), out.data_ptr(), 4 * k
    rest, keeps = (k, least.data_ptr()), (x, weight, out, least)
    pool.run(
        [
            Call(entry, (from_place + first * row, row, end - first, weight.data_ptr(), to_place + first * row, row, *rest), keeps)
            for first, end in shares(x.numel() // k, k, pool)
        ]
    )
    return out


def add_to_rows(into: torch.Tensor, row: torch.Tensor, pool: Pool) -> torch.Tensor:
    """into + row, written over into: fp32 [M, N] and fp32 [N], contiguous."""
    assert into.is_contiguous() and row.is_contiguous() and into.dtype == row.dtype == torch.float32 and row.shape == into.shape[1:]
    (rows, n), entry = into.shape, elementwise_kernels().add_to_rows
    to, source, keeps = into.data_ptr(), row.data_ptr(), (into, row)
    pool.run([Call(entry, (to + 4 * n * first, end - first, source, n), keeps) for first, end in shares(rows, n, pool)])
    return into


@lru_cache(maxsize=64)
def _real(value: float) -> torch.Tensor:
    """fp32 [1]."""
    return torch.tensor([value])


def _pairwise(entry: int, into: torch.Tensor, other: torch.Tensor, pool: Pool) -> None:
    """Run f(into, other, count) over all numbers."""
    assert into.is_contiguous() and other.is_contiguous() and into.shape == other.shape and into.dtype == other.dtype == torch.float32
    to, source, keeps = into.data_ptr(), other.data_ptr(), (into, other)
    pool.run([Call(entry, (to + 4 * first, source + 4 * first, end - first), keeps) for first, end in shares(into.numel(), 1, pool)])


def shares(count: int, size: int, pool: Pool) -> list[tuple[int, int]]:
    """[first, end) of each job over `count` pieces of `size` numbers."""
    jobs = 1 if pool.threads == 1 else max(1, min(count * size // JOB_NUMBERS, JOBS_PER_THREAD * pool.threads))
    return list(pairwise(count * i // jobs for i in range(jobs + 1)))


def emit_gate(module: ir.Module) -> Code:
    """Emit `ElementwiseKernels.gate`."""
    code = Code(module, host_machine(), "gate", [ADDRESS, ADDRESS, I64])
    gate, up, count = code.arguments
    b, four = code.b, code.whole(4)

    def gated(x: V, factor: V) -> V:
        e = exp_of_negative(code, b.fneg(code.intrinsic("llvm.fabs", x)))
        one = code.real(1.0, code.width)
        share = b.fdiv(b.select(b.fcmp_unordered("<", x, code.real(0.0, code.width)), e, one), b.fadd(one, e))
        return b.fmul(b.fmul(x, share), factor)

    def step(i: V) -> None:
        here = code.row(gate, i, four)
        code.store(gated(code.load(F32, here, code.width), code.load(F32, code.row(up, i, four), code.width)), here)

    def single(i: V) -> None:
        here, factor = code.row(gate, i, four), code.load(F32, code.row(up, i, four))
        code.store(code.lane(gated(code.splat(code.load(F32, here), code.width), code.splat(factor, code.width)), 0), here)

    whole = b.and_(count, code.whole(-code.width))
    code.each(code.whole(0), whole, code.width, step)
    code.each(whole, count, 1, single)
    return code.end()


def emit_add(module: ir.Module) -> Code:
    """Emit `ElementwiseKernels.add`."""
    code = Code(module, host_machine(), "add", [ADDRESS, ADDRESS, I64])
    into, other, count = code.arguments
    four = code.whole(4)

    def step(i: V, width: int | None) -> None:
        here = code.row(into, i, four)
        code.store(code.b.fadd(code.load(F32, here, width), code.load(F32, code.row(other, i, four), width)), here)

    _widths(code, count, step)
    return code.end()


def emit_add_to_rows(module: ir.Module, addition: Code) -> Code:
    """Emit `ElementwiseKernels.add_to_rows`."""
    code = Code(module, host_machine(), "add_to_rows", [ADDRESS, I64, ADDRESS, I64])
    into, rows, other, count = code.arguments
    row_bytes = code.b.mul(count, code.whole(4))
    code.each(code.whole(0), rows, 1, lambda row: code.call(addition, code.row(into, row, row_bytes), other, count))
    return code.end()


def emit_rotate(module: ir.Module) -> Code:
    """Emit `ElementwiseKernels.rotate`."""
    code = Code(module, host_machine(), "rotate", [ADDRESS, I64, I64, I64, I64, ADDRESS, ADDRESS, I64])
    x, x_row, rows, heads, dim, cos, sin, cos_row = code.arguments
    b, four, zero = code.b, code.whole(4), code.whole(0)
    half = b.sdiv(dim, code.whole(2))

    def one_row(row: V) -> None:
        cosines, sines = code.row(cos, row, cos_row), code.row(sin, row, cos_row)

        def one_head(head: V) -> None:
            here = code.row(code.row(x, row, x_row), b.mul(head, dim), four)

            def step(i: V, width: int | None) -> None:
                places = [b.mul(i, four), b.mul(b.add(i, half), four)]
                (one, two), (c, d), (s, t) = ([code.load(F32, code.at(of, at), width) for at in places] for of in (here, cosines, sines))
                code.store(b.fsub(b.fmul(one, c), b.fmul(two, s)), code.at(here, places[0]))
                code.store(b.fadd(b.fmul(two, d), b.fmul(one, t)), code.at(here, places[1]))

            _widths(code, half, step)

        code.each(zero, heads, 1, one_head)

    code.each(zero, rows, 1, one_row)
    return code.end()


def _widths(code: Code, count: V, step: Callable[[V, int | None], None]) -> None:
    """step(first, width) over `count` numbers: whole vectors, then one by one."""
    whole = code.b.and_(count, code.whole(-code.width))
    code.each(code.whole(0), whole, code.width, lambda i: step(i, code.width))
    code.each(whole, count, 1, lambda i: step(i, None))


def emit_norm(module: ir.Module) -> Code:
    """Emit `ElementwiseKernels.norm`."""
    code = Code(module, host_machine(), "norm", [ADDRESS, I64, I64, ADDRESS, ADDRESS, I64, I64, ADDRESS])
    x, x_row, rows, weight, out, out_row, k, eps = code.arguments
    b, four, zero = code.b, code.whole(4), code.whole(0)
    whole = b.and_(k, code.whole(-code.width))

    def one_row(row: V) -> None:
        here, there = code.row(x, row, x_row), code.row(out, row, out_row)

        def square(i: V, total: list[V], width: int | None) -> list[V]:
            value = code.load(F32, code.row(here, i, four), width)
            return [code.fma(value, value, total[0])]

        lanes = code.loop(zero, whole, code.width, [code.real(0.0, code.width)], partial(square, width=code.width))[0]
        total = code.loop(whole, k, 1, [code.fold(lanes, b.fadd)], partial(square, width=None))[0]
        mean = b.fadd(b.fdiv(total, b.sitofp(k, F32)), code.load(F32, eps))
        scale = b.fdiv(code.real(1.0), code.intrinsic("llvm.sqrt", mean))

        def write(i: V, width: int | None) -> None:
            value = b.fmul(code.load(F32, code.row(here, i, four), width), code.splat(scale, width))
            code.store(b.fmul(code.load(F32, code.row(weight, i, four), width), value), code.row(there, i, four))

        _widths(code, k, write)

    code.each(zero, rows, 1, one_row)
    return code.end()
