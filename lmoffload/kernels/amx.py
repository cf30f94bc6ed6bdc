"""Intel's AMX: products of tiles of bytes, of 16 rows of 64 bytes each.

A tile register holds what a memory place and a stride say; the sums of 16 x 64 by 64 x 16 signed bytes take 16 cycles. The layout of the
second factor, 4 columns of 16 rows in a line, is that of our tiles (`tiled.py`).
Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from lmoffload.kernels.code import I8, I16, Code, V

LINE_BYTES = 64
"""Bytes of a row of a tile register."""
TILE_LINES = 16

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18
"""The system call of x86-64, and what it is asked: <asm/prctl.h>, ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA."""


@cache
def amx_is_granted() -> bool:
    """Whether the machine has AMX's products of bytes and the system lets this process use them: asked once, for all its threads."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and llvm.get_host_cpu_features().get("amx-int8", False)):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0)


@dataclass(frozen=True)
class Registers:
    """Writes the use of tile registers 0 (sums), 1 (activations) and 2 (weights) for products over `depth` columns, at most 64."""

    code: Code
    depth: int

    def configure(self) -> None:
        """To be called first, in every thread."""
        code, place = self.code, self.code.scratch(LINE_BYTES)
        code.store(ir.Constant(ir.VectorType(I8, LINE_BYTES), [0] * LINE_BYTES), place)
        code.store(ir.Constant(I8, 1), place)  # palette
        shapes = ((TILE_LINES, LINE_BYTES), (TILE_LINES, self.depth), (self.depth // 4, LINE_BYTES))
        for register, (lines, line_bytes) in enumerate(shapes):
            code.store(ir.Constant(I16, line_bytes), code.at(place, 16 + 2 * register))
            code.store(ir.Constant(I8, lines), code.at(place, 48 + register))
        code.known("llvm.x86.ldtilecfg", ir.VoidType(), place)

    def release(self) -> None:
        """To be called last: the system then need not keep the registers when threads switch."""
        self.code.known("llvm.x86.tilerelease", ir.VoidType())

    def clear(self) -> None:
        """Sums of 0."""
        self.code.known("llvm.x86.tilezero", ir.VoidType(), self._register(0))

    def add(self, activations: V, weights: V) -> None:
        """Add the products of 16 rows of `depth` codes by `depth` / 4 lines of weights, both without gaps."""
        code = self.code
        code.known("llvm.x86.tileloadd64", ir.VoidType(), self._register(1), activations, code.whole(self.depth))
        code.known("llvm.x86.tileloadd64", ir.VoidType(), self._register(2), weights, code.whole(LINE_BYTES))
        code.known("llvm.x86.tdpbssd", ir.VoidType(), *(self._register(number) for number in range(3)))

    def store(self, place: V) -> None:
        """The sums, int32 [16 rows of activations, 16 rows of weights]."""
        self.code.known("llvm.x86.tilestored64", ir.VoidType(), self._register(0), place, self.code.whole(LINE_BYTES))

    @staticmethod
    def _register(number: int) -> V:
        return ir.Constant(I8, number)
