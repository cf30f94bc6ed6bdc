"""A board: calls of compiled functions, shared out among threads that wait for them without Python.

To wake a sleeping thread, and to take Python's lock for every job, costs as much as a product of one row with a small matrix. So a thread
that has nothing to do looks at the board for about a millisecond before it sleeps, and the calls on it are taken one by one, in compiled
code, by the leader and by whoever looks.

The board is words of 8 bytes: NEXT the call to be taken next, COUNT of calls, ENTRY the function, ARGUMENTS where those of the first call
lie, STRIDE to the next one's, in bytes; on a cache line of its own ACTIVE, how many helpers are about to take calls. The leader changes
what it says only while NEXT is beyond any COUNT and nobody is active; so a helper that comes late finds nothing, and nobody waits for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, I64, Code, Compiled, V, host_machine

NEXT, COUNT, ENTRY, ARGUMENTS, STRIDE, ACTIVE, WORDS = 0, 1, 2, 3, 4, 8, 16
NOTHING = 1 << 40
LOOKS = 40_000
"""How often a helper looks before it sleeps: some 50 nanoseconds each with x86's pause."""
PATIENCE = 2_000
"""How often the leader looks before it lets others have its core."""


class Call(NamedTuple):
    """A call of a compiled function, as a job."""

    entry: int
    """Its address, of what `emit_entry` wrote."""
    arguments: tuple[int, ...]
    """Whole numbers and addresses."""
    keeps: tuple[torch.Tensor, ...]
    """What the addresses point into."""


class Board:
    """One leader writes calls on it, and takes part; any number of helpers look at it."""

    def __init__(self) -> None:
        self._words = torch.zeros(WORDS, dtype=torch.int64)
        self._words[NEXT] = NOTHING
        self.address = self._words.data_ptr()

    @property
    def has_calls(self) -> bool:
        """Whether there are calls that nobody has taken."""
        return bool(self._words[NEXT] < self._words[COUNT])

    def lead(self, calls: Sequence[Call], rouse: Callable[[], None]) -> None:
        """Run all calls, of one function; all have ended when this returns. GIL released.

        rouse: called when the calls stand on the board, to wake those who sleep.
        """
        assert len({call.entry for call in calls}) == 1, "calls of one function"
        arguments = array("q", [word for call in calls for word in call.arguments])
        place, size = arguments.buffer_info()
        functions().post(self.address, calls[0].entry, place, 8 * size // len(calls), len(calls))
        rouse()
        functions().lead(self.address)

    def help(self, summons: int) -> bool:
        """Take calls until the word at `summons` is not 0 (True), or nothing was there for a while (False). GIL released."""
        return functions().help(self.address, summons, LOOKS) != 0


@dataclass(frozen=True)
class Functions:
    """Compiled.

    post(board, entry, arguments, stride, count); lead(board); help(board, summons, looks): the word at summons.
    """

    post: Callable[..., None]
    lead: Callable[..., None]
    help: Callable[..., int]


@cache
def functions() -> Functions:
    """The compiled functions, compiled at the first call."""
    module = ir.Module("lmoffload_board")
    take = _emit_take(module)
    emitted = _emit_post(module), _emit_lead(module, take), _emit_help(module, take)
    compiled = Compiled(module)
    return Functions(*(compiled.function(code) for code in emitted))


def emit_entry(code: Code) -> Code:
    """Emit entry(arguments): a call of `code` with arguments from memory, 8 bytes each."""
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
    entry = b.inttoptr(_word(code, board, ENTRY), ADDRESS)
    entry.type = ir.PointerType(ir.FunctionType(ir.VoidType(), [ADDRESS]))  # llvmlite calls only what it sees to be a function
    b.call(entry, [arguments])
    b.branch(head)
    b.position_at_end(after)
    return code.end()


def _emit_post(module: ir.Module) -> Code:
    code = Code(module, host_machine(), "post", [ADDRESS, I64, I64, I64, I64])
    board, entry, arguments, stride, count = code.arguments
    for word, value in ((COUNT, count), (ENTRY, entry), (ARGUMENTS, arguments), (STRIDE, stride), (NEXT, code.whole(0))):
        _set(code, board, word, value)
    return code.end()


def _emit_lead(module: ir.Module, take: Code) -> Code:
    code = Code(module, host_machine(), "lead", [ADDRESS])
    board = code.arguments[0]
    code.call(take, board)
    _set(code, board, NEXT, code.whole(NOTHING))
    b = code.b
    head, waiting, yielding, again, after = (code.function.append_basic_block() for _ in range(5))
    before = b.block
    b.branch(head)
    b.position_at_end(head)
    looks = b.phi(I64)
    looks.add_incoming(code.whole(0), before)
    b.cbranch(b.icmp_signed("==", _word(code, board, ACTIVE), code.whole(0)), after, waiting)
    b.position_at_end(waiting)
    _pause(code)
    more = b.add(looks, code.whole(1))
    b.cbranch(b.icmp_signed(">", more, code.whole(PATIENCE)), yielding, again)
    b.position_at_end(yielding)
    code.known("sched_yield", ir.IntType(32))
    b.branch(again)
    b.position_at_end(again)
    looks.add_incoming(more, again)
    b.branch(head)
    b.position_at_end(after)
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
    looks.add_incoming(b.add(looks, code.whole(1)), idle)
    b.branch(head)
    b.position_at_end(after)
    b.ret(called)
    return code
