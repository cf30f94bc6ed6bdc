"""A board: calls of compiled functions, shared out among threads that wait for them without Python.

To wake a sleeping thread, and to take Python's lock for every job, costs as much as a product of one row with a small matrix. So a thread
that has nothing to do looks at the board for about a millisecond before it sleeps, and the calls on it are taken one by one, in compiled
code, by the leader and by whoever looks. Calls come in stages: those of a stage begin when the stage before has ended, without Python too.

The board is words of 8 bytes: NEXT the call to be taken next, COUNT of calls, ENTRY the function, ARGUMENTS where those of the first call
lie, STRIDE to the next one's, in bytes; on a cache line of its own ACTIVE, how many helpers are about to take calls; on another BUSY,
whether stages are under way. The leader changes what it says only while NEXT is beyond any COUNT and nobody is active; so a helper that
comes late finds nothing, and nobody waits for it.
"""

from __future__ import annotations

import ctypes
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, I32, I64, Code, Compiled, V, host_machine

NEXT, COUNT, ENTRY, ARGUMENTS, STRIDE, ACTIVE, BUSY, WORDS = 0, 1, 2, 3, 4, 8, 16, 24
STAGE_ENTRY, STAGE_ARGUMENTS, STAGE_STRIDE, STAGE_COUNT, STAGE_END_NS, STAGE_WORDS = 0, 1, 2, 3, 4, 5
"""Words of a stage in memory; the leader writes when it ended."""
NOTHING = 1 << 40
LOOKS = 40_000
"""How often a helper looks before it sleeps: some 50 nanoseconds each with x86's pause."""
PATIENCE = 2_000
"""How often the leader looks before it lets others have its core. A helper that did would be away when the next calls come."""


class Call(NamedTuple):
    """A call of a compiled function, as a job."""

    entry: int
    """Its address, of what `emit_entry` wrote."""
    arguments: tuple[int, ...]
    """Whole numbers, addresses and `real_word`s."""
    keeps: tuple[torch.Tensor, ...]
    """What the addresses point into."""


def real_word(value: float) -> int:
    """The word of an argument that is an fp32."""
    return int.from_bytes(struct.pack("<f", value), "little")


class Program:
    """Calls in memory, as they are read from the board: stages, each of one function."""

    def __init__(self, table: array[int], most_calls: int, keeps: Sequence[object]) -> None:
        self._table, self._keeps = table, keeps
        self.address, self.num_stages = table.buffer_info()[0], len(table) // STAGE_WORDS
        self.most_calls = most_calls
        """Of a stage."""

    @staticmethod
    def of(stages: Sequence[Sequence[Call]]) -> Program:
        """Of these stages."""
        words, table = array("q", [word for calls in stages for call in calls for word in call.arguments]), array("q")
        place = words.buffer_info()[0]
        for calls in stages:
            entry, arguments, _ = calls[0]
            assert all(call.entry == entry for call in calls), "calls of one function"
            size = 8 * len(arguments)
            table.extend((entry, place, size, len(calls), 0))
            place += size * len(calls)
        return Program(table, max(map(len, stages)), [words, *(call.keeps for calls in stages for call in calls)])

    @staticmethod
    def in_a_row(programs: Sequence[Program]) -> Program:
        """One program after another."""
        table = array("q")
        for program in programs:
            table.extend(program._table)
        return Program(table, max(program.most_calls for program in programs), programs)

    @property
    def ends_s(self) -> list[float]:
        """`time.monotonic` at the end of each stage, the last time."""
        return [1e-9 * end for end in self._table[STAGE_END_NS::STAGE_WORDS]]


class Board:
    """One leader writes calls on it, and takes part; any number of helpers look at it."""

    def __init__(self) -> None:
        memory = torch.zeros(WORDS, dtype=torch.int64)
        self.address = memory.data_ptr()
        self._memory, self._words = memory, (ctypes.c_int64 * WORDS).from_address(self.address)
        self._words[NEXT] = NOTHING

    @property
    def is_busy(self) -> bool:
        """Whether there are calls, or may be soon."""
        return bool(self._words[BUSY])

    def lead(self, program: Program, rouse: Callable[[int], None]) -> None:
        """Run all calls, stage by stage; all have ended when this returns. GIL released.

        rouse: called when the board is busy, to wake that many of those who sleep.
        """
        self._words[BUSY] = 1
        rouse(program.most_calls - 1)
        functions().lead(self.address, program.address, program.num_stages)

    def help(self, summons: int) -> bool:
        """Take calls until the word at `summons` is not 0 (True), or nothing was there for a while (False). GIL released."""
        return functions().help(self.address, summons, LOOKS) != 0


@dataclass(frozen=True)
class Functions:
    """Compiled.

    lead(board, stages, count); help(board, summons, looks): the word at summons.
    """

    lead: Callable[..., None]
    help: Callable[..., int]


@cache
def functions() -> Functions:
    """The compiled functions, compiled at the first call."""
    module = ir.Module("lmoffload_board")
    take = _emit_take(module)
    emitted = _emit_lead(module, _emit_stage(module, take)), _emit_help(module, take)
    compiled = Compiled(module)
    return Functions(*(compiled.function(code) for code in emitted))


def emit_entry(code: Code) -> Code:
    """Emit entry(arguments): a call of `code` with arguments from memory, 8 bytes each; of an fp32 they are the first four."""
    entry = Code(code.module, host_machine(), f"{code.function.name}_entry", [ADDRESS])
    place = entry.arguments[0]
    kinds = code.function.function_type.args
    entry.call(code, *(entry.load(kind, entry.at(place, 8 * i)) for i, kind in enumerate(kinds)))
    return entry.end()


def _word(code: Code, board: V, word: int) -> V:
    return code.b.load_atomic(code.at(board, 8 * word), "seq_cst", 8, typ=I64)


def _set(code: Code, board: V, word: int, value: V) -> None:
    code.b.atomic_rmw("xchg", code.at(board, 8 * word), value, "seq_cst")


def _pause(code: Code) -> None:
    """Leave the core's other work, or its clock, some room."""
    if host_machine().is_x86:
        code.known("llvm.x86.sse2.pause", ir.VoidType())


def _now_ns(code: Code) -> V:
    """The clock of `time.monotonic`."""
    place = code.scratch(16)
    code.known("clock_gettime", I32, ir.Constant(I32, time.CLOCK_MONOTONIC), place)
    seconds, rest = (code.load(I64, code.at(place, offset)) for offset in (0, 8))
    return code.b.add(code.b.mul(seconds, code.whole(10**9)), rest)


def _emit_take(module: ir.Module) -> Code:
    """take(board): calls until none is left."""
    code = Code(module, host_machine(), "take", [ADDRESS], internal=True)
    b, board = code.b, code.arguments[0]
    head, inside, after = (code.function.append_basic_block() for _ in range(3))
    b.branch(head)
    b.position_at_end(head)
    index = b.atomic_rmw("add", code.at(board, 8 * NEXT), code.whole(1), "seq_cst")
    b.cbranch(b.icmp_signed("<", index, _word(code, board, COUNT)), inside, after)
    b.position_at_end(inside)
    arguments = code.row(b.inttoptr(_word(code, board, ARGUMENTS), ADDRESS), index, _word(code, board, STRIDE))
    _call(code, b.inttoptr(_word(code, board, ENTRY), ADDRESS), arguments)
    b.branch(head)
    b.position_at_end(after)
    return code.end()


def _emit_stage(module: ir.Module, take: Code) -> Code:
    """stage(board, stage): do its only call, or post its calls, take part, and wait until all have ended."""
    code = Code(module, host_machine(), "stage", [ADDRESS, ADDRESS], internal=True)
    board, stage = code.arguments
    b = code.b
    with b.if_else(b.icmp_signed("==", code.load(I64, code.at(stage, 8 * STAGE_COUNT)), code.whole(1))) as (alone, shared):
        with alone:
            entry, arguments = (b.inttoptr(code.load(I64, code.at(stage, 8 * part)), ADDRESS) for part in (STAGE_ENTRY, STAGE_ARGUMENTS))
            _call(code, entry, arguments)
        with shared:
            _share(code, board, stage, take)
    code.store(_now_ns(code), code.at(stage, 8 * STAGE_END_NS))
    return code.end()


def _call(code: Code, entry: V, arguments: V) -> None:
    entry.type = ir.PointerType(ir.FunctionType(ir.VoidType(), [ADDRESS]))  # llvmlite calls only what it sees to be a function
    code.b.call(entry, [arguments])


def _share(code: Code, board: V, stage: V, take: Code) -> None:
    b = code.b
    parts = (COUNT, STAGE_COUNT), (ENTRY, STAGE_ENTRY), (ARGUMENTS, STAGE_ARGUMENTS), (STRIDE, STAGE_STRIDE)
    for word, part in parts:
        _set(code, board, word, code.load(I64, code.at(stage, 8 * part)))
    _set(code, board, NEXT, code.whole(0))
    code.call(take, board)
    _set(code, board, NEXT, code.whole(NOTHING))
    head, waiting, after = (code.function.append_basic_block() for _ in range(3))
    before = b.block
    b.branch(head)
    b.position_at_end(head)
    looks = b.phi(I64)
    looks.add_incoming(code.whole(0), before)
    b.cbranch(b.icmp_signed("==", _word(code, board, ACTIVE), code.whole(0)), after, waiting)
    b.position_at_end(waiting)
    _pause(code)
    with code.when(b.icmp_signed(">", looks, code.whole(PATIENCE))):
        code.known("sched_yield", I32)
    looks.add_incoming(b.add(looks, code.whole(1)), b.block)
    b.branch(head)
    b.position_at_end(after)


def _emit_lead(module: ir.Module, stage: Code) -> Code:
    code = Code(module, host_machine(), "lead", [ADDRESS, ADDRESS, I64])
    board, stages, count = code.arguments
    size = code.whole(8 * STAGE_WORDS)
    code.each(code.whole(0), count, 1, lambda index: code.call(stage, board, code.row(stages, index, size)))
    _set(code, board, BUSY, code.whole(0))
    return code.end()


def _emit_help(module: ir.Module, take: Code) -> Code:
    code = Code(module, host_machine(), "help", [ADDRESS, ADDRESS, I64], result=I64)
    board, summons, most = code.arguments
    b = code.b
    head, look, busy, idle, after = (code.function.append_basic_block() for _ in range(5))
    before = b.block
    b.branch(head)
    b.position_at_end(head)
    looks = b.phi(I64)
    looks.add_incoming(code.whole(0), before)
    called = _word(code, summons, 0)
    stop = b.or_(b.icmp_signed("!=", called, code.whole(0)), b.icmp_signed(">=", looks, most))
    b.cbranch(stop, after, look)
    b.position_at_end(look)
    b.cbranch(b.icmp_signed("<", _word(code, board, NEXT), _word(code, board, COUNT)), busy, idle)
    b.position_at_end(busy)
    b.atomic_rmw("add", code.at(board, 8 * ACTIVE), code.whole(1), "seq_cst")
    code.call(take, board)
    b.atomic_rmw("sub", code.at(board, 8 * ACTIVE), code.whole(1), "seq_cst")
    looks.add_incoming(code.whole(0), b.block)
    b.branch(head)
    b.position_at_end(idle)
    _pause(code)
    looks.add_incoming(b.add(looks, code.whole(1)), b.block)
    b.branch(head)
    b.position_at_end(after)
    b.ret(called)
    return code
