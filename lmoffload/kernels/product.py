"""The compiled functions of one stored format: widen rows, and the product of rows with activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from lmoffload.kernels.board import emit_entry
from lmoffload.kernels.code import ADDRESS, I64, Code, Compiled, Machine, V, host_machine
from lmoffload.kernels.dots import MOST_AT_ONCE, emit_sweep
from lmoffload.kernels.k_quants import STEP
from lmoffload.kernels.stored import load_plain, walk_steps
from lmoffload.kernels.tile_floats import emit_tile_product, emit_tile_widen
from lmoffload.kernels.tiled import is_tiled
from lmoffload_solver.formats import FORMATS

COLUMN_BLOCK = 1024
"""Columns between two folds: six activation rows of it take 24 KiB of a first-level cache. A multiple of every format's block."""

SCRATCH_ROW_BYTES = 4 * COLUMN_BLOCK + 64
"""A row of widened weights; not a power of two, so that rows do not meet in one set of the cache."""

PANEL_ROWS = 32
"""Weight rows widened together: 130 KiB of a second-level cache."""

FEW_ROWS = 8
"""Weight rows of a panel while few activation rows read them once: their bytes are read nearly in order."""


@dataclass(frozen=True)
class FormatKernels:
    """Compiled functions of one stored format; all numbers whole, addresses as int, strides in bytes.

    widen(source, source_row, rows, destination, destination_row, k): rows to fp32.
    product(weight, weight_row, rows, x, x_row, m, out, out_row, k): out[m, n] = x[m] . weight[n]; takes 130 KiB of the stack.
    entry: the address of the same for a `board.Call`.
    Of a quantized format: whole tiles, and product is that of `tile_floats`.
    """

    widen: Callable[..., None]
    product: Callable[..., None]
    entry: int


@cache
def format_kernels(format_name: str) -> FormatKernels:
    """The compiled functions of a format, compiled at the first call (about half a second)."""
    module = ir.Module(f"lmoffload_{format_name}")
    emit = (emit_tile_widen, emit_tile_product) if is_tiled(format_name) else (emit_widen, emit_product)
    widen, product = (one(module, host_machine(), format_name) for one in emit)
    entry = emit_entry(product)
    compiled = Compiled(module)
    return FormatKernels(compiled.function(widen), compiled.function(product), compiled.address(entry))


def emit_widen(module: ir.Module, machine: Machine, format_name: str) -> Code:
    """Emit `FormatKernels.widen`."""
    code = Code(module, machine, f"widen_{format_name}", [ADDRESS, I64, I64, ADDRESS, I64, I64])
    source, source_row, rows, target, target_row, k = code.arguments
    steps, tail_start = code.b.sdiv(k, code.whole(STEP)), code.b.and_(k, code.whole(-STEP))
    fmt = FORMATS[format_name]

    def widen_row(row: V) -> None:
        here, there = code.row(source, row, source_row), code.row(target, row, target_row)

        def widen_step(step: V, wide: list[list[V]], _: list[V]) -> list[V]:
            for i, vector in enumerate(wide[0]):
                code.store(vector, code.at(code.row(there, step, code.whole(4 * STEP)), 4 * code.width * i))
            return []

        def widen_one(column: V) -> None:
            value = load_plain(code, format_name, code.row(here, column, code.whole(fmt.block_bytes)), None)
            code.store(value, code.row(there, column, code.whole(4)))

        walk_steps(code, format_name, [here], steps, [], widen_step)
        if fmt.block_elements == 1:
            code.each(tail_start, k, 1, widen_one)

    code.each(code.whole(0), rows, 1, widen_row)
    return code.end()


def emit_product(module: ir.Module, machine: Machine, format_name: str) -> Code:
    """Emit `FormatKernels.product`.

    Few activation rows: panels of few rows, straight from the stored format. More: the first group of activation rows widens a panel into
    the scratch while it multiplies, so that reading memory and computing overlap; the others find the panel in the cache.
    """
    sweep = emit_sweep(module, machine, format_name)
    plain, fmt = format_name == "fp32", FORMATS[format_name]
    keep, wide = (sweep, sweep) if plain else (emit_sweep(module, machine, format_name, keep=True), emit_sweep(module, machine, "fp32"))
    code = Code(module, machine, f"product_{format_name}", [ADDRESS, I64, I64, ADDRESS, I64, I64, ADDRESS, I64, I64])
    weight, weight_row, rows, x, x_row, m, out, out_row, k = code.arguments
    b, zero, scratch = code.b, code.whole(0), code.scratch(PANEL_ROWS * SCRATCH_ROW_BYTES)

    def place(row: V, column: V) -> V:
        return code.row(code.row(out, row, out_row), column, code.whole(4))

    def panels(size: V, widened: bool) -> None:
        def one_panel(index: V) -> None:
            first = b.mul(index, size)
            count = code.least(size, b.sub(rows, first))

            def one_block(column: V) -> None:
                stored = b.mul(b.sdiv(column, code.whole(fmt.block_elements)), code.whole(fmt.block_bytes))
                here = code.at(code.row(weight, first, weight_row), stored)
                xs, columns = code.row(x, column, code.whole(4)), code.least(code.whole(COLUMN_BLOCK), b.sub(k, column))
                if not widened:
                    code.call(sweep, here, weight_row, count, xs, x_row, m, place(zero, first), out_row, columns)
                    return
                most, kept = code.whole(MOST_AT_ONCE), (scratch, code.whole(SCRATCH_ROW_BYTES))
                code.call(keep, here, weight_row, count, xs, x_row, most, place(zero, first), out_row, columns, *kept)
                more = code.row(xs, most, x_row), x_row, b.sub(m, most), place(most, first), out_row, columns
                code.call(wide, *kept, count, *more)

            code.each(zero, k, COLUMN_BLOCK, one_block)

        code.each(zero, b.sdiv(b.add(rows, b.sub(size, code.whole(1))), size), 1, one_panel)

    code.each(zero, m, 1, lambda j: code.fill(place(j, zero), rows))
    few = b.icmp_signed("<=", m, code.whole(MOST_AT_ONCE))
    with code.when(few):
        panels(code.whole(FEW_ROWS), widened=False)
    with code.when(b.not_(few)):
        panels(code.whole(PANEL_ROWS), widened=not plain)
    return code.end()
