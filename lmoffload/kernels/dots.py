"""Emit dot products of weight rows with activation rows.

The lanes of a vector run along the columns: one accumulator for each pair of a weight row and an activation row, folded at the end of a
block of columns, blocks added in order. Every pair takes the same steps whatever it is computed beside: its bits depend on it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I64, Code, Machine, V
from lmoffload.kernels.k_quants import STEP
from lmoffload.kernels.stored import load_plain, walk_steps
from lmoffload_solver.formats import FORMATS

GROUP_SIZES = (6, 4, 2, 1)
"""How many activation rows meet a weight vector while it is in a register; M is made up of these."""

MOST_AT_ONCE = GROUP_SIZES[0]


@dataclass(frozen=True)
class Rows:
    """Rows in memory: where the first begins and how far the next is, in bytes."""

    address: V
    stride: V

    def at(self, code: Code, index: V | int) -> V:
        return code.row(self.address, code.whole(index) if isinstance(index, int) else index, self.stride)

    def beginning(self, code: Code, index: V | int) -> Rows:
        return Rows(self.at(code, index), self.stride)


def rows_at_once(format_name: str, columns: int, width: int) -> int:
    """Weight rows of a micro-kernel: the most whose sums and widened vectors leave two registers free (of 32 with AVX-512, else 16)."""
    vectors = 1 if FORMATS[format_name].block_elements == 1 else STEP // width
    registers = 32 if width == 16 else 16
    return next((rows for rows in (8, 4, 2) if rows * (columns + vectors) + 2 <= registers), 1)


def emit_sweep(module: ir.Module, machine: Machine, format_name: str, *, keep: bool = False) -> Code:
    """Emit sweep(weight, weight_row, rows, x, x_row, m, out, out_row, k[, kept, kept_row]): out[j, i] += x[j] . weight[i] over k columns.

    With `keep`, m is MOST_AT_ONCE and the widened weights are stored at `kept` on the way, for the sweeps of further activation rows.
    """
    parameters = [ADDRESS, I64, I64, ADDRESS, I64, I64, ADDRESS, I64, I64, *([ADDRESS, I64] if keep else [])]
    code = Code(module, machine, f"sweep_{format_name}{'_keep' if keep else ''}", parameters, internal=True)
    weight, weight_row, rows, x, x_row, m, out, out_row, k, *kept = code.arguments
    b = code.b

    def group(first: V, size: int) -> None:
        together = rows_at_once(format_name, size, machine.width)
        whole_end = b.sub(rows, b.srem(rows, code.whole(together)))
        for start, end, number in ((code.whole(0), whole_end, together), *([(whole_end, rows, 1)] if together > 1 else [])):

            def dots(row: V, number: int = number) -> None:
                places = Rows(code.at(out, b.mul(row, code.whole(4))), out_row).beginning(code, first)
                micro = Dots(code, format_name, number, size)
                micro.emit(
                    Rows(weight, weight_row).beginning(code, row),
                    Rows(x, x_row).beginning(code, first),
                    places,
                    k,
                    Rows(kept[0], kept[1]).beginning(code, row) if keep else None,
                )

            code.each(start, end, number, dots)

    first = code.whole(0)
    for size in GROUP_SIZES[:1] if keep else GROUP_SIZES:
        end = b.sub(m, b.srem(b.sub(m, first), code.whole(size)))
        code.each(first, end, size, lambda start, size=size: group(start, size))  # type: ignore[misc]
        first = end
    return code.end()


@dataclass(frozen=True)
class Dots:
    """The micro-kernel: all dot products of `rows` weight rows with `columns` activation rows."""

    code: Code
    format_name: str
    rows: int
    columns: int

    @property
    def plain(self) -> bool:
        return FORMATS[self.format_name].block_elements == 1

    def emit(self, weight: Rows, x: Rows, out: Rows, k: V, kept: Rows | None) -> None:
        """out[j, i] += x[j] . weight[i] over k columns."""
        code, width, zero = self.code, self.code.width, self.code.real(0.0, self.code.width)
        places = [rows.at(code, i) for rows, count in ((weight, self.rows), (x, self.columns)) for i in range(count)]
        kept_places = [] if kept is None else [kept.at(code, i) for i in range(self.rows)]

        def step(index: V, wide: list[list[V]], sums: list[V]) -> list[V]:
            return self._meet(wide, code.b.mul(index, code.whole(4 * STEP)), sums, places, kept_places)

        def turn(index: V, sums: list[V]) -> list[V]:
            size = code.whole(width * FORMATS[self.format_name].block_bytes)
            wide = [[load_plain(code, self.format_name, code.row(address, index, size), width)] for address in places[: self.rows]]
            return self._meet(wide, code.b.mul(index, code.whole(4 * width)), sums, places, kept_places)

        sums, turns = [zero] * (self.rows * self.columns), code.b.sdiv(k, code.whole(width if self.plain else STEP))
        if self.plain:
            sums = code.loop(code.whole(0), turns, 1, sums, turn)
        else:
            sums = walk_steps(code, self.format_name, places[: self.rows], turns, sums, step)
        self._add(fold_all(code, sums), out)
        if self.plain:
            start = code.b.mul(turns, code.whole(width))
            with code.when(code.b.icmp_signed("<", start, k)):
                self._emit_last(start, k, places, kept_places, out)

    def _add(self, sums: list[V], out: Rows) -> None:
        code = self.code
        for j in range(self.columns):
            place, total = out.at(code, j), code.vector(sums[j * self.rows : (j + 1) * self.rows])
            code.store(code.b.fadd(code.load(F32, place, self.rows), total), place)

    def _meet(self, wide: list[list[V]], start: V, sums: list[V], places: list[V], kept: list[V]) -> list[V]:
        """The weights' vectors of some columns meet those of the activations, which lie from byte `start` on."""
        code, width = self.code, self.code.width
        for part in range(len(wide[0])):
            offset = code.b.add(start, code.whole(4 * width * part))
            for i, address in enumerate(kept):
                code.store(wide[i][part], code.at(address, offset))
            xs = [code.load(F32, code.at(address, offset), width) for address in places[self.rows :]]
            sums = [code.fma(wide[n % self.rows][part], xs[n // self.rows], total) for n, total in enumerate(sums)]
        return sums

    def _emit_last(self, start: V, k: V, places: list[V], kept: list[V], out: Rows) -> None:
        """The columns that fill no vector, one by one."""
        code, size = self.code, self.code.whole(FORMATS[self.format_name].block_bytes)

        def one(index: V, sums: list[V]) -> list[V]:
            wide = [load_plain(code, self.format_name, code.row(address, index, size), None) for address in places[: self.rows]]
            for value, address in zip(wide, kept, strict=False):
                code.store(value, code.row(address, index, code.whole(4)))
            xs = [code.load(F32, code.row(address, index, code.whole(4))) for address in places[self.rows :]]
            return [code.fma(wide[n % self.rows], xs[n // self.rows], total) for n, total in enumerate(sums)]

        self._add(code.loop(start, k, 1, [code.real(0.0)] * (self.rows * self.columns), one), out)


def fold_all(code: Code, vectors: list[V]) -> list[V]:
    """The lane sums of any number of vectors, as scalars."""
    sums: list[V] = []
    while len(sums) < len(vectors):
        left = len(vectors) - len(sums)
        together = next(n for n in (16, 8, 4, 2, 1) if n <= min(left, code.width))
        (folded,) = code.fold_sums(vectors[len(sums) : len(sums) + together])
        sums += [code.lane(folded, i) for i in range(together)]
    return sums
