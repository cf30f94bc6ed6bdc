"""Emit the storing of a (row, key head) pair's newest key and value, where `kv_rows` has them."""

from __future__ import annotations

from llvmlite import ir

from lmoffload.kernels.code import ADDRESS, F32, I16, I32, I64, Code, Machine, V
from lmoffload.kernels.codec import CODECS
from lmoffload.kernels.halves import vector_kind
from lmoffload.kernels.stored import load_plain
from lmoffload_solver.counting import NEWEST_FORMAT
from lmoffload_solver.formats import FORMATS, LINE_ELEMENTS, PARAMETER_BYTES

STORABLE = frozenset({"fp32", "bf16", *CODECS})
"""Formats that code is emitted for."""


def emit_store_key(module: ir.Module, machine: Machine, format_name: str, encode: Code | None) -> Code:
    """Emit store_key(new, keys, head, room, position, dim): fp32 [dim] becomes the key of a head at a position; keys: where its row begins.

    encode: `codec.emit_encode_line` of a quantized format.
    """
    code = Code(module, machine, "store_key", [ADDRESS, ADDRESS, I64, I64, I64, I64], internal=True)
    new, keys, head, room, position, dim = code.arguments
    b = code.b
    if encode is None:
        _narrow(code, format_name, new, _line(code, format_name, keys, b.add(b.mul(head, room), b.srem(position, room)), dim), dim)
        return code.end()
    codec, width = CODECS[format_name], code.whole(LINE_ELEMENTS)
    group_bytes = b.mul(dim, code.whole(codec.line_bytes + PARAMETER_BYTES))
    newest_bytes = b.mul(dim, code.whole(FORMATS[NEWEST_FORMAT].block_bytes * LINE_ELEMENTS))
    mine = code.row(keys, head, b.add(b.mul(room, group_bytes), newest_bytes))
    newest, place = code.row(mine, room, group_bytes), b.srem(position, width)
    _narrow(code, NEWEST_FORMAT, new, _line(code, NEWEST_FORMAT, newest, place, dim), dim)
    with code.when(b.icmp_signed("==", place, code.whole(LINE_ELEMENTS - 1))):
        group = code.row(mine, b.srem(b.sdiv(position, width), room), group_bytes)
        parameters, line = code.row(group, dim, code.whole(codec.line_bytes)), code.scratch(4 * LINE_ELEMENTS)

        def channel(index: V) -> None:
            def token(number: V) -> None:
                channel_size = code.whole(FORMATS[NEWEST_FORMAT].block_bytes)
                here = code.row(_line(code, NEWEST_FORMAT, newest, number, dim), index, channel_size)
                code.store(load_plain(code, NEWEST_FORMAT, here, None), code.row(line, number, code.whole(4)))

            code.each(code.whole(0), width, 1, token)
            places = code.row(group, index, code.whole(codec.line_bytes)), code.row(parameters, index, code.whole(PARAMETER_BYTES))
            code.call(encode, line, *places)

        code.each(code.whole(0), dim, 1, channel)
    return code.end()


def emit_store_value(module: ir.Module, machine: Machine, format_name: str, encode: Code | None) -> Code:
    """Emit store_value(new, values, head, room, position, dim): the same of a value."""
    code = Code(module, machine, "store_value", [ADDRESS, ADDRESS, I64, I64, I64, I64], internal=True)
    new, values, head, room, position, dim = code.arguments
    b, place = code.b, code.b.srem(position, room)
    if encode is None:
        _narrow(code, format_name, new, _line(code, format_name, values, b.add(b.mul(head, room), place), dim), dim)
        return code.end()
    codec = CODECS[format_name]
    line_bytes, width = code.whole(codec.line_bytes), code.whole(LINE_ELEMENTS)
    panels = b.sdiv(b.add(dim, code.whole(LINE_ELEMENTS - 1)), width)
    panel_bytes = b.mul(room, code.whole(codec.line_bytes + PARAMETER_BYTES))
    line = code.scratch(4 * LINE_ELEMENTS)

    def one(number: V) -> None:
        first = b.mul(number, width)
        code.fill(line, width)
        there = code.least(width, b.sub(dim, first))
        source = code.row(new, first, code.whole(4))
        code.each(code.whole(0), there, 1, lambda i: code.store(_number(code, source, i), code.row(line, i, code.whole(4))))
        panel = code.row(values, b.add(b.mul(head, panels), number), panel_bytes)
        parameter = code.row(code.row(panel, room, line_bytes), place, code.whole(PARAMETER_BYTES))
        code.call(encode, line, code.row(panel, place, line_bytes), parameter)

    code.each(code.whole(0), panels, 1, one)
    return code.end()


def _number(code: Code, numbers: V, index: V) -> V:
    return code.load(F32, code.row(numbers, index, code.whole(4)))


def _line(code: Code, format_name: str, memory: V, index: V, dim: V) -> V:
    return code.row(memory, index, code.b.mul(dim, code.whole(FORMATS[format_name].block_bytes)))


def _narrow(code: Code, format_name: str, source: V, target: V, count: V) -> None:
    """fp32 [count] to a plain format, rounded to the nearest, to even where two are as near."""
    size, whole = code.whole(FORMATS[format_name].block_bytes), code.b.and_(count, code.whole(-code.width))

    def step(index: V, width: int | None) -> None:
        value = code.load(F32, code.row(source, index, code.whole(4)), width)
        code.store(value if format_name == "fp32" else _bf16(code, value, width), code.row(target, index, size))

    code.each(code.whole(0), whole, code.width, lambda i: step(i, code.width))
    code.each(whole, count, 1, lambda i: step(i, None))


def _bf16(code: Code, value: V, width: int | None) -> V:
    b, shift = code.b, code.bits(16, width)
    whole = b.bitcast(value, vector_kind(I32, width))
    odd = b.and_(b.lshr(whole, shift), code.bits(1, width))
    rounded = b.lshr(b.add(whole, b.add(odd, code.bits(0x7FFF, width))), shift)
    is_nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.select(is_nan, code.bits(0x7FC0, width), rounded), vector_kind(I16, width))
