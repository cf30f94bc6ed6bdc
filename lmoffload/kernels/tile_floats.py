"""The compiled functions of the quantized formats with fp32 activations: widen tiles to rows, and products that widen in registers.

Lanes are the 16 rows of a tile; every sum runs over the columns of a group in order, and the groups' sums are added in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I8, I16, I32, I64, Code, Machine, V
from lmoffload.kernels.halves import widen_fp16
from lmoffload.kernels.tiled import TILE_ROWS
from lmoffload.kernels.tokens import each_block
from lmoffload_solver.formats import QUANTIZED

STEP_BYTES = 4 * TILE_ROWS
"""Stored bytes of the same columns of every row of a tile: 4 columns of int8 or 8 of int4."""


@dataclass(frozen=True)
class TileLayout:
    """Where things lie in a group of a tile of a format, in bytes."""

    format_name: str

    @property
    def nibbles(self) -> bool:
        return self.format_name != "int8"

    @property
    def group(self) -> int:
        return QUANTIZED[self.format_name].block_elements

    @property
    def head_bytes(self) -> int:
        return (4 if self.nibbles else 2) * TILE_ROWS

    @property
    def group_bytes(self) -> int:
        return TILE_ROWS * QUANTIZED[self.format_name].block_bytes

    @property
    def step_columns(self) -> int:
        return 8 if self.nibbles else 4


def emit_tile_product(module: ir.Module, machine: Machine, format_name: str) -> Code:
    """Emit product(tiles, tile_bytes, num_tiles, x, x_row, m, out, out_row, k)."""
    code = Code(module, machine, f"tile_product_{format_name}", [ADDRESS, I64, I64, ADDRESS, I64, I64, ADDRESS, I64, I64])
    tiles, tile_bytes, num_tiles, x, x_row, m, out, out_row, k = code.arguments
    layout, vectors = TileLayout(format_name), TILE_ROWS // code.width
    b = code.b

    def block(tile: V, first: V, size: int, column: V) -> None:
        rows = [code.row(x, b.add(first, code.whole(j)), x_row) for j in range(size)]

        def group(g: V, totals: list[V]) -> list[V]:
            here = code.row(tile, g, code.whole(layout.group_bytes))
            heads = [_head(code, layout, here, vector) for vector in range(vectors)]

            def step(index: V, sums: list[V]) -> list[V]:
                place = code.row(code.at(here, layout.head_bytes), index, code.whole(STEP_BYTES))
                start = b.add(b.mul(g, code.whole(layout.group)), b.mul(index, code.whole(layout.step_columns)))
                offset = b.mul(start, code.whole(4))
                stored = [code.load(I32, code.at(place, 4 * code.width * v), code.width) for v in range(vectors)]
                for c in range(layout.step_columns):
                    wide = [_weight(code, layout, stored[v], c, heads[v]) for v in range(vectors)]
                    xs = [code.splat(code.load(F32, code.at(code.at(row, offset), 4 * c)), code.width) for row in rows]
                    sums = [code.fma(wide[n % vectors], xs[n // vectors], total) for n, total in enumerate(sums)]
                return sums

            zero = code.real(0.0, code.width)
            sums = code.loop(code.whole(0), code.whole(layout.group // layout.step_columns), 1, [zero] * (size * vectors), step)
            return [b.fadd(total, part) for total, part in zip(totals, sums, strict=True)]

        zero = code.real(0.0, code.width)
        totals = code.loop(code.whole(0), b.sdiv(k, code.whole(layout.group)), 1, [zero] * (size * vectors), group)
        for n, total in enumerate(totals):
            target = code.row(code.row(out, b.add(first, code.whole(n // vectors)), out_row), column, code.whole(4))
            code.store(total, code.at(target, 4 * code.width * (n % vectors)))

    def one_tile(index: V) -> None:
        tile, column = code.row(tiles, index, tile_bytes), b.mul(index, code.whole(TILE_ROWS))
        sizes = (8, 4, 2, 1) if code.width == TILE_ROWS else (3, 2, 1)
        each_block(code, m, sizes, lambda first, size: block(tile, first, size, column))

    code.each(code.whole(0), num_tiles, 1, one_tile)
    return code.end()


def emit_tile_widen(module: ir.Module, machine: Machine, format_name: str) -> Code:
    """Emit widen(source, source_row, rows, target, target_row, k) for whole tiles: rows, a multiple of 16, to fp32."""
    code = Code(module, machine, f"tile_widen_{format_name}", [ADDRESS, I64, I64, ADDRESS, I64, I64])
    source, source_row, rows, target, target_row, k = code.arguments
    layout, b = TileLayout(format_name), code.b

    def row(index: V) -> None:
        lane = b.and_(index, code.whole(TILE_ROWS - 1))
        tile, there = code.row(source, b.sub(index, lane), source_row), code.row(target, index, target_row)

        def group(g: V) -> None:
            here = code.row(tile, g, code.whole(layout.group_bytes))
            halves = code.row(here, lane, code.whole(2))
            heads = [
                code.splat(widen_fp16(code, code.load(I16, code.at(halves, 2 * TILE_ROWS * i)), None), code.width)
                for i in range(2 if layout.nibbles else 1)
            ]
            codes = code.at(code.row(here, lane, code.whole(4)), layout.head_bytes)

            def columns(start: V) -> None:  # 32 columns
                begin = code.row(codes, start, code.whole(STEP_BYTES // layout.step_columns))
                words = [code.load(I32, code.at(begin, STEP_BYTES * i)) for i in range(32 // layout.step_columns)]
                place = code.row(there, b.add(b.mul(g, code.whole(layout.group)), start), code.whole(4))
                for i, vector in enumerate(_row_codes(code, layout, words)):
                    real = b.sitofp(vector, ir.VectorType(F32, code.width))
                    wide = code.fma(real, heads[0], heads[1]) if layout.nibbles else b.fmul(real, heads[0])
                    code.store(wide, code.at(place, 4 * code.width * i))

            code.each(code.whole(0), code.whole(layout.group), 32, columns)

        code.each(code.whole(0), b.sdiv(k, code.whole(layout.group)), 1, group)

    code.each(code.whole(0), rows, 1, row)
    return code.end()


def _head(code: Code, layout: TileLayout, group: V, vector: int) -> tuple[V, V | None]:
    """The scales and minima of a vector of rows."""
    offsets = [2 * (TILE_ROWS * i + code.width * vector) for i in range(2 if layout.nibbles else 1)]
    wide = [widen_fp16(code, code.load(I16, code.at(group, offset), code.width), code.width) for offset in offsets]
    return wide[0], wide[1] if layout.nibbles else None


def _weight(code: Code, layout: TileLayout, stored: V, column: int, head: tuple[V, V | None]) -> V:
    """Column `column` of the step, widened: rounded once, as the reference is."""
    b, width = code.b, code.width
    scale, least = head
    reals = ir.VectorType(F32, width)
    if least is None:
        found = b.ashr(b.shl(stored, code.bits(24 - 8 * column, width)), code.bits(24, width))
        return b.fmul(b.sitofp(found, reals), scale)
    place = 8 * (column % 4) + 4 * (column // 4)
    found = b.and_(b.lshr(stored, code.bits(place, width)), code.bits(15, width))
    return code.fma(b.sitofp(found, reals), scale, least)


def _row_codes(code: Code, layout: TileLayout, words: list[V]) -> list[V]:
    """32 columns of one row as whole numbers in vectors of the machine's width."""
    b = code.b
    whole = code.vector(words)
    if layout.nibbles:
        kind = ir.VectorType(I32, len(words))
        low = b.and_(whole, ir.Constant(kind, [0x0F0F0F0F] * len(words)))
        high = b.and_(b.lshr(whole, ir.Constant(kind, [4] * len(words))), ir.Constant(kind, [0x0F0F0F0F] * len(words)))
        whole = code.lanes(low, high, [i for pair in range(len(words)) for i in (pair, pair + len(words))])
    codes = b.bitcast(whole, ir.VectorType(I8, 32))
    parts = [code.lanes(codes, None, range(start, start + code.width)) for start in range(0, 32, code.width)]
    kind = ir.VectorType(I32, code.width)
    return [b.sext(part, kind) for part in parts]
