"""The compiled functions of int8 x int8 and int4 x int8 products over tiles.

out[j, i] = sum over groups g of (weight's scale[i, g] * scale[g, j]) * dot[i, g, j] + minimum[i, g] * (scale[g, j] * sum[g, j]), where
dots and sums are exact whole numbers of codes and the groups are added in order: a row's bits depend on it alone, and on no machine's
instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from llvmlite import ir

from lmoffload.kernels.amx import TILE_LINES, amx_is_granted
from lmoffload.kernels.amx_product import AmxProduct
from lmoffload.kernels.board import emit_entry
from lmoffload.kernels.bytes_dot import CHUNK, BytesDot
from lmoffload.kernels.code import ADDRESS, F32, I8, I16, I32, I64, Code, Compiled, Machine, V, host_machine
from lmoffload.kernels.halves import widen_fp16
from lmoffload.kernels.tiled import TILE_ROWS
from lmoffload.kernels.tokens import each_block, emit_pack
from lmoffload_solver.formats import QUANTIZED

STEPS = CHUNK // 4

MANY_ROWS = 16
"""Activation rows from which on tile registers, where the machine has them, are used: a block of theirs is full."""

FEW_ROWS = 2
"""Activation rows up to which a tile's bytes arrive no faster than they are used."""

AHEAD_BYTES = 4096
"""How far ahead they are asked for then, into the second-level cache, which has more room for what is on its way than the first."""


@dataclass(frozen=True)
class IntegerKernels:
    """Compiled functions of one format; all numbers whole, addresses as int, strides in bytes.

    pack(x, x_row, m, target, packed_row, k): quantize activations (`tokens`).
    product(tiles, tile_bytes, num_tiles, packed, packed_row, m, out, out_row, k): whole tiles.
    entry, pack_entry: the addresses of the same for a `board.Call`.
    block_rows: rows may be packed and multiplied apart where the first is a multiple of this.
    packed_multiple: there is room for a multiple of so many packed rows.
    """

    pack: Callable[..., None]
    product: Callable[..., None]
    entry: int
    pack_entry: int
    block_rows: int
    packed_multiple: int


@cache
def integer_kernels(format_name: str, many: bool) -> IntegerKernels:
    """The compiled functions of a format for this machine, for at least `MANY_ROWS` activation rows or for fewer, compiled at the first
    call. Both give the same bits."""
    return compile_integer(format_name, replace(host_machine(), amx=many and amx_is_granted()))


@cache
def compile_integer(format_name: str, machine: Machine) -> IntegerKernels:
    """The same for any machine whose instructions this one has."""
    module, narrow = ir.Module(f"lmoffload_integer_{format_name}"), replace(machine, width=machine.dot_width)
    group, nibbles = QUANTIZED[format_name].block_elements, format_name != "int8"
    code = Code(module, narrow, "product", [ADDRESS, I64, I64, ADDRESS, I64, I64, ADDRESS, I64, I64])
    sizes: tuple[int, ...] = (12, 8, 4, 2, 1) if narrow.width == TILE_ROWS else (4, 2, 1)
    if machine.amx:
        sizes, by_tiles = (TILE_LINES,), AmxProduct(code, group, nibbles)
        pack = emit_pack(module, machine, group, sizes, shifted=False, real=nibbles, run=by_tiles.depth)
        by_tiles.emit()
    else:
        pack = emit_pack(module, machine, group, sizes, shifted=machine.dots == "vnni" and not nibbles, real=nibbles)
        Product(code, machine, group, nibbles).emit(sizes)
    entry, pack_entry = emit_entry(code), emit_entry(pack)
    compiled = Compiled(module)
    entries = compiled.address(entry), compiled.address(pack_entry)
    return IntegerKernels(compiled.function(pack), compiled.function(code), *entries, sizes[0], sizes[-1])


@dataclass(frozen=True)
class Product:
    """Writes the product of tiles with packed activations."""

    code: Code
    machine: Machine
    group: int
    nibbles: bool

    @property
    def dot(self) -> BytesDot:
        return BytesDot(self.code, self.machine.dots, self.nibbles)

    @property
    def vectors(self) -> int:
        """Vectors of the rows of a tile."""
        return TILE_ROWS // self.code.width

    @property
    def head_bytes(self) -> int:
        """Scales, and minima, of a group of a tile."""
        return (4 if self.nibbles else 2) * TILE_ROWS

    @property
    def group_bytes(self) -> int:
        return self.head_bytes + self.group * TILE_ROWS // (2 if self.nibbles else 1)

    def emit(self, sizes: tuple[int, ...]) -> Code:
        code = self.code
        tiles, tile_bytes, num_tiles, packed, packed_row, m, out, out_row, k = code.arguments

        def tile(index: V) -> None:
            here, column = code.row(tiles, index, tile_bytes), code.row(out, index, code.whole(4 * TILE_ROWS))

            def block(first: V, size: int) -> None:
                self._block(here, code.row(packed, first, packed_row), code.row(column, first, out_row), out_row, k, size)

            each_block(code, m, sizes, block)

        code.each(code.whole(0), num_tiles, 1, tile)
        return code.end()

    def _block(self, tile: V, packed: V, out: V, out_row: V, k: V, size: int) -> None:
        """One tile by `size` rows."""
        code, b = self.code, self.code.b
        groups = b.sdiv(k, code.whole(self.group))
        sums = code.row(packed, k, code.whole(size))

        def group(g: V, totals: list[V]) -> list[V]:
            here = code.row(tile, g, code.whole(self.group_bytes))
            if size <= FEW_ROWS:
                code.prefetch_line(code.at(here, AHEAD_BYTES), level=2)  # the rest chunk by chunk: many at once wait for each other
            beside = code.row(sums, g, code.whole(8 * size))
            dots = self._dots(code.at(here, self.head_bytes), code.row(packed, g, code.whole(self.group * size)), beside, size)
            reals = ir.VectorType(F32, code.width)
            wide = self._halves(here)
            scales = [b.fmul(wide[n % self.vectors], scale) for n, scale in enumerate(self._of_rows(code.at(beside, 4 * size), size))]
            totals = [code.fma(b.sitofp(dot, reals), scale, total) for dot, scale, total in zip(dots, scales, totals, strict=True)]
            if not self.nibbles:
                return totals
            least = self._halves(code.at(here, 2 * TILE_ROWS))
            sums_of_rows = enumerate(self._of_rows(beside, size))
            return [code.fma(found, least[n % self.vectors], totals[n]) for n, found in sums_of_rows]

        zero = code.real(0.0, code.width)
        totals = code.loop(code.whole(0), groups, 1, [zero] * (size * self.vectors), group)
        for n, total in enumerate(totals):
            row, vector = divmod(n, self.vectors)
            code.store(total, code.at(code.row(out, code.whole(row), out_row), 4 * code.width * vector))

    def _halves(self, place: V) -> list[V]:
        """Scales or minima of the weight rows, for every vector."""
        code = self.code
        halves = [code.load(I16, code.at(place, 2 * code.width * v), code.width) for v in range(self.vectors)]
        return [widen_fp16(code, half, code.width) for half in halves]

    def _of_rows(self, place: V, size: int) -> list[V]:
        """A number of each activation row, for every row and vector."""
        found = [self.code.splat(self.code.load(F32, self.code.at(place, 4 * row)), self.code.width) for row in range(size)]
        return [found[n // self.vectors] for n in range(size * self.vectors)]

    def _dots(self, codes: V, xs: V, beside: V, size: int) -> list[V]:
        """The dots of one group, for every row and vector."""
        code = self.code
        if self.dot.shifted:
            starts = [code.splat(code.load(I32, code.at(beside, 4 * row)), code.width) for row in range(size)]
        else:
            starts = [code.bits(0, code.width)] * size
        sums = [starts[n // self.vectors] for n in range(size * self.vectors)]

        def chunk(index: V, sums: list[V]) -> list[V]:
            if size <= FEW_ROWS:
                here = code.row(codes, index, code.whole(self._chunk_bytes))
                for line in range(0, self._chunk_bytes, 64):
                    code.prefetch_line(code.at(here, AHEAD_BYTES + line), level=2)
            x = code.row(xs, index, code.whole(CHUNK * size))
            activations = [[code.load(I32, code.at(x, 4 * (step * size + row))) for row in range(size)] for step in range(STEPS)]
            return self.dot.chunk(sums, self._weights(code.row(codes, index, code.whole(self._chunk_bytes))), activations)

        if self.group == CHUNK or size <= FEW_ROWS:
            for index in range(self.group // CHUNK):
                sums = chunk(code.whole(index), sums)
            return sums
        return code.loop(code.whole(0), code.whole(self.group // CHUNK), 1, sums, chunk)

    @property
    def _chunk_bytes(self) -> int:
        return TILE_ROWS * CHUNK // (2 if self.nibbles else 1)

    def _weights(self, codes: V) -> list[list[V]]:
        """The codes of 32 columns: [8 steps][vectors]."""
        code, b, lanes = self.code, self.code.b, 4 * self.code.width
        kind = ir.VectorType(I8, lanes)
        loads = STEPS // (2 if self.nibbles else 1)
        stored = [[code.load(I8, code.at(codes, 4 * TILE_ROWS * i + lanes * v), lanes) for v in range(self.vectors)] for i in range(loads)]
        if not self.nibbles:
            return stored
        mask, four = ir.Constant(kind, [15] * lanes), ir.Constant(kind, [4] * lanes)
        return [half for one in stored for half in ([b.and_(w, mask) for w in one], [b.lshr(w, four) for w in one])]
