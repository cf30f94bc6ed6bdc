"""The product of tiles with packed activations by AMX: bit for bit that of `integer.Product`, 16 activation rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from lmoffload.kernels.amx import LINE_BYTES, TILE_LINES, Registers
from lmoffload.kernels.code import F32, I8, I16, I32, Code, V
from lmoffload.kernels.halves import widen_fp16
from lmoffload.kernels.tiled import TILE_ROWS

BLOCK_COLUMNS = 1024
"""Columns whose codes of a tile are laid out for AMX at once: with those of 16 activation rows they stay in a first-level cache."""


@dataclass(frozen=True)
class AmxProduct:
    """Writes it; the parameters of `code` are those of `IntegerKernels.product`, the activations packed in blocks of 16 rows."""

    code: Code
    group: int
    nibbles: bool

    @property
    def depth(self) -> int:
        """Columns of one product of tile registers."""
        return min(self.group, LINE_BYTES)

    @property
    def head_bytes(self) -> int:
        """Scales, and minima, of a group of a tile."""
        return (4 if self.nibbles else 2) * TILE_ROWS

    @property
    def group_bytes(self) -> int:
        return self.head_bytes + self.group * TILE_ROWS // (2 if self.nibbles else 1)

    def emit(self) -> Code:
        code, b = self.code, self.code.b
        tiles, tile_bytes, num_tiles, packed, packed_row, m, out, out_row, k = code.arguments
        registers = Registers(code, self.depth)
        codes, sums = code.scratch(BLOCK_COLUMNS * TILE_ROWS), code.scratch(TILE_LINES * LINE_BYTES)
        groups, at_once = b.sdiv(k, code.whole(self.group)), BLOCK_COLUMNS // self.group
        registers.configure()

        def tile(index: V) -> None:
            here, column = code.row(tiles, index, tile_bytes), code.row(out, index, code.whole(4 * TILE_ROWS))

            def columns(first: V) -> None:
                heads, count = code.row(here, first, code.whole(self.group_bytes)), code.least(code.whole(at_once), b.sub(groups, first))
                self._lay_out(heads, count, codes)

                def rows(row: V) -> None:
                    block = code.row(packed, row, packed_row)
                    xs = code.row(block, first, code.whole(self.group * TILE_LINES))
                    beside = code.row(code.row(block, k, code.whole(TILE_LINES)), first, code.whole(8 * TILE_LINES))
                    places = [
                        code.row(column, code.least(b.add(row, code.whole(i)), b.sub(m, code.whole(1))), out_row) for i in range(TILE_LINES)
                    ]
                    begun = b.icmp_signed(">", first, code.whole(0))
                    zero = code.real(0.0, code.width)
                    totals = [b.select(begun, code.load(F32, place, code.width), zero) for place in places]

                    def one_group(g: V, totals: list[V]) -> list[V]:
                        here, beside_it = code.row(heads, g, code.whole(self.group_bytes)), code.row(beside, g, code.whole(8 * TILE_LINES))
                        offset = b.mul(g, code.whole(self.group * TILE_LINES))
                        registers.clear()
                        for part in range(0, self.group * TILE_LINES, self.depth * TILE_LINES):
                            registers.add(code.at(code.at(xs, offset), part), code.at(code.at(codes, offset), part))
                        registers.store(sums)
                        return self._add(here, beside_it, sums, totals)

                    totals = code.loop(code.whole(0), count, 1, totals, one_group)
                    for place, total in reversed(list(zip(places, totals, strict=True))):  # of rows beyond the last, none is written last
                        code.store(total, place)

                code.each(code.whole(0), m, TILE_LINES, rows)

            code.each(code.whole(0), groups, at_once, columns)

        code.each(code.whole(0), num_tiles, 1, tile)
        registers.release()
        return code.end()

    def _lay_out(self, heads: V, count: V, codes: V) -> None:
        """The codes of `count` groups, one a byte, without what is stored between them."""
        code, b, kind = self.code, self.code.b, ir.VectorType(I8, LINE_BYTES)
        mask, four = (ir.Constant(kind, [value] * LINE_BYTES) for value in (15, 4))

        def one_group(g: V) -> None:
            source = code.at(code.row(heads, g, code.whole(self.group_bytes)), self.head_bytes)
            target = code.row(codes, g, code.whole(self.group * TILE_ROWS))
            for line in range((self.group_bytes - self.head_bytes) // LINE_BYTES):
                stored = code.load(I8, code.at(source, LINE_BYTES * line), LINE_BYTES)
                parts = [b.and_(stored, mask), b.lshr(stored, four)] if self.nibbles else [stored]
                for i, part in enumerate(parts):
                    code.store(part, code.at(target, LINE_BYTES * (len(parts) * line + i)))

        code.each(code.whole(0), count, 1, one_group)

    def _add(self, head: V, beside: V, sums: V, totals: list[V]) -> list[V]:
        """totals with one group's part, as `integer.Product` adds it."""
        code, b = self.code, self.code.b
        reals = ir.VectorType(F32, code.width)
        scale = widen_fp16(code, code.load(I16, head, code.width), code.width)
        least = widen_fp16(code, code.load(I16, code.at(head, 2 * TILE_ROWS), code.width), code.width) if self.nibbles else None
        found = []
        for row, total in enumerate(totals):
            dot = b.sitofp(code.load(I32, code.at(sums, LINE_BYTES * row), code.width), reals)
            scaled = code.fma(dot, b.fmul(scale, self._of_row(beside, TILE_LINES + row)), total)
            found.append(scaled if least is None else code.fma(self._of_row(beside, row), least, scaled))
        return found

    def _of_row(self, beside: V, place: int) -> V:
        return self.code.splat(self.code.load(F32, self.code.at(beside, 4 * place)), self.code.width)
