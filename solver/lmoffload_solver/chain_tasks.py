"""Which tasks a decision has: the structure of a block's work, without prices. The executor lays its schedule out from these.

An amount of 1 stands for a task that there is; `ChainWork` gives the same tasks their seconds.
"""

from __future__ import annotations

from dataclasses import replace

from lmoffload_solver import counting
from lmoffload_solver.chain_schedule import BatchWork, UnitWork, handing_on
from lmoffload_solver.decision import Decision, KVUnit
from lmoffload_solver.formats import format_of
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.schedule import HEAD_PIECE_BYTES, Piece, Unit


def head_pieces(model: ModelShape, decision: Decision) -> tuple[tuple[int, int], ...]:
    """Rows [first, end) of the output head that a unit of their own computes: all of them where the head is at home on the device; else
    whole tiles, no larger than what the largest layer moves up."""
    head = model.head
    rows, format_name = counting.matrix_size(head)[0], decision.format_of(head)
    if decision.homes[head.name] == "device" or head.num_runs > 1:
        return ((0, rows),)
    layers = (counting.layer_matrices(model, layer) for layer in range(model.num_layers))
    moved = [sum(decision.tensor_bytes(t) for t in tensors if decision.homes[t.name] != "device") for tensors in layers]
    tile, row_bytes = format_of(format_name).tile_rows, decision.tensor_bytes(head) // rows
    height = max(1, min(rows, (max(moved) or HEAD_PIECE_BYTES) // row_bytes) // tile) * tile
    return tuple((first, min(rows, first + height)) for first in range(0, rows, height))


def chain_units(model: ModelShape, decision: Decision) -> tuple[Unit, ...]:
    """What one micro-batch computes between two switches: every layer, and the pieces of the output head; with the matrices that are not at
    home on the device."""

    def pieces(tensors: tuple[TensorShape, ...]) -> tuple[Piece, ...]:
        away = [tensor for tensor in tensors if decision.homes[tensor.name] != "device"]
        return tuple(Piece(t.name, 0, counting.matrix_size(t)[0], decision.tensor_bytes(t), t.num_runs) for t in away)

    layers = [counting.layer_matrices(model, layer) for layer in range(model.num_layers)]
    units = [Unit(i, "layer", i, pieces(tensors), computes=tuple(t.name for t in tensors)) for i, tensors in enumerate(layers)]
    whole = pieces((model.head,))
    for first, end in head_pieces(model, decision):
        cut = tuple(replace(p, first_row=first, end_row=end, num_bytes=p.num_bytes // p.end_row * (end - first)) for p in whole)
        units.append(Unit(len(units), "head", None, cut, first, end))
    return tuple(units)


def task_structure(model: ModelShape, decision: Decision, num_batches: int, num_steps: int) -> list[list[UnitWork]]:
    """The units of each step: every layer, and the pieces of the output head."""
    prefill = _step(model, decision, num_batches, decodes=False)
    decode = _step(model, decision, num_batches, decodes=True)
    return [prefill, *([decode] * (num_steps - 1))]


def _step(model: ModelShape, decision: Decision, num_batches: int, *, decodes: bool) -> list[UnitWork]:
    hidden = float(decision.hidden != "device")
    units = [
        UnitWork(
            layer,
            *_weights(decision, counting.layer_matrices(model, layer)),
            dequantize=0.0,
            batches=tuple(_batch(unit, hidden, decodes) for unit in decision.kv[layer][:num_batches]),
        )
        for layer in range(model.num_layers)
    ]
    head = UnitWork(None, *_weights(decision, (model.head,)), dequantize=0.0, batches=(BatchWork(compute=1.0),) * num_batches)
    return [*handing_on(units, decision.pipeline, 1.0, 1.0), *[head] * len(head_pieces(model, decision))]


def _weights(decision: Decision, tensors: tuple[TensorShape, ...]) -> tuple[float, float]:
    """(read, uploaded)."""
    homes = {decision.homes[tensor.name] for tensor in tensors}
    return float("disk" in homes), float(bool(homes - {"device"}))


def _batch(unit: KVUnit, hidden: float, decodes: bool) -> BatchWork:
    away, on_disk = unit.home != "device", float(unit.home == "disk")
    attends = float(decodes and unit.host_attends)
    return BatchWork(
        read=on_disk * decodes,
        load_kv=float(away and decodes and not attends),
        load_hidden=hidden,
        compute=1.0,
        attend=attends,
        after=attends,
        store_kv=float(away and not attends),
        store_hidden=hidden,
        write=on_disk,
    )
