"""Compiled functions without a compiler: LLVM through llvmlite, which numba brings along.

A kernel is written as a Python function that emits the instructions of one small function, on generic vectors: LLVM chooses the machine's
own (AVX-512, AVX2, NEON, ...). Compiling takes some tenths of a second; calls go through ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import llvmlite.binding as llvm
from llvmlite import ir

I8, I16, I32, I64, F32, ADDRESS = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.PointerType()

Dots = Literal["vnni", "maddubs", "generic"]
"""How 4 bytes are multiplied by 4 bytes and summed: one instruction, AVX2's two, or plain shifts and products."""

V = Any
"""A value of the function being written (`ir.Value`); llvmlite is untyped."""


@dataclass(frozen=True)
class Machine:
    """What the emitted code takes from the machine; LLVM adapts the rest."""

    width: int
    """fp32 lanes of a vector register."""
    halves: bool
    """Whether fp16 is converted by an instruction; LLVM would call a function that is not there otherwise."""
    dots: Dots = "generic"
    dot_width: int = 8
    """Whole-number lanes of a vector of `dots`."""
    is_x86: bool = False
    amx: bool = False
    """Whether many rows of bytes are multiplied by tile registers."""


@cache
def host_machine() -> Machine:
    """This machine."""
    features = llvm.get_host_cpu_features()
    arm = llvm.get_process_triple().startswith(("aarch64", "arm64"))
    width = 16 if features.get("avx512f", False) else 8
    dots: tuple[Dots, int] = ("generic", width)
    if features.get("avx512vnni", False):
        dots = "vnni", 16
    elif features.get("avxvnni", False):
        dots = "vnni", 8
    elif features.get("avx2", False):
        dots = "maddubs", 8
    x86 = llvm.get_process_triple().startswith(("x86_64", "i686"))
    return Machine(width, arm or bool(features.get("f16c", False)), *dots, x86)


class Code:
    """Writes the body of one function. Addresses need no alignment; offsets are in bytes."""

    def __init__(
        self, module: ir.Module, machine: Machine, name: str, parameters: Sequence[Any], internal: bool = False, result: Any = None
    ) -> None:
        self.module = module
        self.width = machine.width
        self.halves = machine.halves
        self.function = ir.Function(module, ir.FunctionType(result or ir.VoidType(), list(parameters)), name)
        if internal:
            self.function.linkage = "internal"
        self.arguments: Sequence[V] = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def whole(self, value: int) -> V:
        return ir.Constant(I64, value)

    def real(self, value: float, width: int | None = None) -> V:
        return ir.Constant(F32, value) if width is None else ir.Constant(ir.VectorType(F32, width), [value] * width)

    def bits(self, value: int, width: int | None = None) -> V:
        return ir.Constant(I32, value) if width is None else ir.Constant(ir.VectorType(I32, width), [value] * width)

    def at(self, address: V, offset: V | int) -> V:
        return self.b.gep(address, [self.whole(offset) if isinstance(offset, int) else offset], source_etype=I8)

    def scratch(self, num_bytes: int) -> V:
        """Memory of the function's own, there from its beginning."""
        with self.b.goto_entry_block():
            place = self.b.alloca(ir.ArrayType(I8, num_bytes))
            place.align = 64  # a cache line
        place.type = ADDRESS  # llvmlite gives it a pointer to a type, which LLVM no longer knows
        return place

    def row(self, address: V, index: V, row_bytes: V) -> V:
        return self.at(address, self.b.mul(index, row_bytes))

    def load(self, kind: Any, address: V, width: int | None = None) -> V:
        return self.b.load(address, typ=kind if width is None else ir.VectorType(kind, width), align=1)

    def store(self, value: V, address: V) -> None:
        self.b.store(value, address, align=1)

    def splat(self, scalar: V, width: int | None) -> V:
        if width is None:
            return scalar
        kind = ir.VectorType(scalar.type, width)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, width), [0] * width))

    def fma(self, x: V, y: V, z: V) -> V:
        """x * y + z, rounded once wherever the machine can."""
        return self.intrinsic("llvm.fmuladd", x, y, z)

    def larger(self, x: V, y: V) -> V:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def least(self, x: V, y: V) -> V:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def least_seen(self, place: V, window: V) -> V:
        """The first key that the query at a place sees: max(0, place - window + 1)."""
        first = self.b.add(self.b.sub(place, window), self.whole(1))
        return self.b.select(self.b.icmp_signed(">", first, self.whole(0)), first, self.whole(0))

    def intrinsic(self, name: str, *values: V) -> V:
        kind = values[0].type
        full = f"{name}.v{kind.count}f32" if isinstance(kind, ir.VectorType) else f"{name}.f32"
        known = self.module.globals.get(full)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(kind, [kind] * len(values)), full)
        return self.b.call(known, values)

    def known(self, name: str, result: Any, *values: V) -> V:
        """A call of one of LLVM's own functions."""
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(result, [value.type for value in values]), name)
        return self.b.call(found, values)

    def lanes(self, first: V, second: V | None, places: Sequence[int]) -> V:
        """The lanes at `places` of the two vectors laid end to end."""
        other = ir.Constant(first.type, ir.Undefined) if second is None else second
        return self.b.shuffle_vector(first, other, ir.Constant(ir.VectorType(I32, len(places)), list(places)))

    def lane(self, vector: V, place: int) -> V:
        return self.b.extract_element(vector, ir.Constant(I32, place))

    def vector(self, scalars: Sequence[V]) -> V:
        kind = ir.VectorType(scalars[0].type, len(scalars))
        built = ir.Constant(kind, ir.Undefined)
        for i, scalar in enumerate(scalars):
            built = self.b.insert_element(built, scalar, ir.Constant(I32, i))
        return built

    def fold(self, vector: V, combine: Callable[[V, V], V]) -> V:
        """Combine the lanes by halves: a fixed order, whatever surrounds it."""
        width = vector.type.count
        while width > 1:
            width //= 2
            vector = combine(self.lanes(vector, None, range(width)), self.lanes(vector, None, range(width, 2 * width)))
        return self.lane(vector, 0)

    def fold_sums(self, vectors: Sequence[V]) -> list[V]:
        """The lane sums of a power of two of vectors as one vector: bit for bit those of `fold`, at a third of its cost."""
        vectors, share = list(vectors), vectors[0].type.count
        while share > 1:
            share //= 2
            if len(vectors) == 1:
                low = [i for i in range(vectors[0].type.count) if i % (2 * share) < share]
                one = vectors[0]
                vectors = [self.b.fadd(self.lanes(one, None, low), self.lanes(one, None, [i + share for i in low]))]
                continue
            low = [i for i in range(2 * vectors[0].type.count) if i % (2 * share) < share]
            high = [i + share for i in low]
            pairs = zip(vectors[0::2], vectors[1::2], strict=True)
            vectors = [self.b.fadd(self.lanes(one, two, low), self.lanes(one, two, high)) for one, two in pairs]
        return vectors

    def loop(self, first: V, end: V, step: int, carried: Sequence[V], body: Callable[[V, list[V]], Sequence[V]]) -> list[V]:
        """for index in range(first, end, step): carried = body(index, carried); the values carried out of it."""
        before = self.b.block
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(first, before)
        phis = [self.b.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        self.b.cbranch(self.b.icmp_signed("<", index, end), inside, after)
        self.b.position_at_end(inside)
        results = body(index, list(phis))
        index.add_incoming(self.b.add(index, self.whole(step)), self.b.block)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return phis

    def each(self, first: V, end: V, step: int, body: Callable[[V], None]) -> None:
        """A loop that carries nothing."""

        def run(index: V, _: list[V]) -> list[V]:
            body(index)
            return []

        self.loop(first, end, step, [], run)

    def fill(self, address: V, count: V) -> None:
        """Zero fp32 [count]."""
        self.each(self.whole(0), count, 1, lambda i: self.store(self.real(0.0), self.row(address, i, self.whole(4))))

    def prefetch(self, address: V, num_bytes: V) -> None:
        """Ask for the cache lines from an address on; where nothing is mapped it does no harm."""
        self.each(self.whole(0), num_bytes, 64, lambda offset: self.prefetch_line(self.at(address, offset)))

    def prefetch_line(self, address: V, level: int = 1) -> None:
        """Ask for one cache line, for a level of the cache and those behind it."""
        name, kinds = "llvm.prefetch.p0", [ADDRESS, I32, I32, I32]
        known = self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), name)
        read, locality, data = self.bits(0), self.bits(4 - level), self.bits(1)
        self.b.call(known, [address, read, locality, data])

    @contextmanager
    def when(self, condition: V) -> Iterator[None]:
        with self.b.if_then(condition):
            yield

    def call(self, function: Code, *values: V) -> None:
        self.b.call(function.function, values)

    def end(self) -> Code:
        self.b.ret_void()
        return self


class Compiled:
    """A compiled module; keeps its machine code alive and hands out its functions."""

    def __init__(self, module: ir.Module) -> None:
        with _COMPILING:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            target = llvm.Target.from_default_triple()
            machine = target.create_target_machine(
                cpu=llvm.get_host_cpu_name(),
                features=llvm.get_host_cpu_features().flatten(),
                opt=3,
                reloc="default",
                codemodel="jitdefault",
            )
            parsed = llvm.parse_assembly(str(module))
            parsed.verify()
            tuning = llvm.create_pipeline_tuning_options(speed_level=2)
            tuning.loop_unrolling = tuning.loop_vectorization = tuning.slp_vectorization = False  # vectors are written out already
            builder = llvm.create_pass_builder(machine, tuning)
            builder.getModulePassManager().run(parsed, builder)
            self.optimized = parsed
            self.machine = machine
            self._engine = llvm.create_mcjit_compiler(parsed, machine)
            self._engine.finalize_object()

    def address(self, code: Code) -> int:
        """Where a function's code lies, as long as this module lives."""
        return int(self._engine.get_function_address(code.function.name))

    def function(self, code: Code) -> Callable[..., Any]:
        """A Python callable of a function's code: addresses and whole numbers as int, reals as float. It keeps the module alive."""
        kind = code.function.function_type
        kinds = [ctypes.c_float if one == F32 else ctypes.c_int64 for one in kind.args]
        result = None if isinstance(kind.return_type, ir.VoidType) else ctypes.c_int64
        call: Any = ctypes.CFUNCTYPE(result, *kinds)(self.address(code))
        call.module = self
        return call  # type: ignore[no-any-return]


_COMPILING = threading.Lock()
