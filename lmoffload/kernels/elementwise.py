"""What lies between products, in one pass each, shared out over the pool: root-mean-square norms and gated activations.

torch runs each of their operators over the whole of memory by one thread. Here too a row's bits depend on it alone: norms sum in a fixed
order, and the numbers of an activation do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
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
    """

    gate: int
    norm: int
    code: Compiled


@cache
def elementwise_kernels() -> ElementwiseKernels:
    """The compiled functions, compiled at the first call."""
    module = ir.Module("lmoffload_elementwise")
    entries = [emit_entry(emit(module)) for emit in (emit_gate, emit_norm)]
    compiled = Compiled(module)
    return ElementwiseKernels(*(compiled.address(entry) for entry in entries), compiled)


def silu_gate(gate: torch.Tensor, up: torch.Tensor, pool: Pool) -> torch.Tensor:
    """silu(gate) * up, written over gate; within 8 units in the last place of each number, or 1e-35.

    gate, up: fp32 of one shape, contiguous.
    """
    assert gate.is_contiguous() and up.is_contiguous() and gate.shape == up.shape and gate.dtype == up.dtype == torch.float32
    entry, places = elementwise_kernels().gate, (gate.data_ptr(), up.data_ptr())
    pool.run(
        [Call(entry, (*(place + 4 * first for place in places), end - first), (gate, up)) for first, end in shares(gate.numel(), 1, pool)]
    )
    return gate


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, pool: Pool) -> torch.Tensor:
    """weight * x / sqrt(mean(x ** 2) + eps) over the last dimension; each number within (K / 16 + 16) 2^-24 of its size.

    x: fp32 [..., K]; weight: fp32 [K]. Returns fp32 [..., K], contiguous.
    """
    k = x.shape[-1]
    assert x.dtype == weight.dtype == torch.float32 and weight.shape == (k,)
    x, weight = x.contiguous(), weight.contiguous()
    out, least = torch.empty_like(x), torch.tensor([eps])
    entry, from_place, to_place, row = elementwise_kernels().norm, x.data_ptr(), out.data_ptr(), 4 * k
    rest, keeps = (k, least.data_ptr()), (x, weight, out, least)
    pool.run(
        [
            Call(entry, (from_place + first * row, row, end - first, weight.data_ptr(), to_place + first * row, row, *rest), keeps)
            for first, end in shares(x.numel() // k, k, pool)
        ]
    )
    return out


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

        def write(width: int | None, i: V) -> None:
            value = b.fmul(code.load(F32, code.row(here, i, four), width), code.splat(scale, width))
            code.store(b.fmul(code.load(F32, code.row(weight, i, four), width), value), code.row(there, i, four))

        code.each(zero, whole, code.width, lambda i: write(code.width, i))
        code.each(whole, k, 1, lambda i: write(None, i))

    code.each(zero, rows, 1, one_row)
    return code.end()
