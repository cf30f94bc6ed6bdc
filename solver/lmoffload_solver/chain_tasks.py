"""Which tasks a decision has: the structure of a block's work, without prices. The executor lays its schedule out from these.

An amount of 1 stands for a task that there is; `ChainWork` gives the same tasks their seconds.
"""

from __future__ import annotations

from lmoffload_solver import counting
from lmoffload_solver.chain_schedule import BatchWork, UnitWork
from lmoffload_solver.decision import Decision, KVUnit
from lmoffload_solver.formats import stored_bytes
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import Piece, Unit


def chain_units(model: ModelShape, plan: Plan) -> tuple[Unit, ...]:
    """What one micro-batch computes between two switches: every layer, and the output head; with the matrices that are not at home on the
    device."""

    def pieces(tensors: tuple[TensorShape, ...]) -> tuple[Piece, ...]:
        planned = plan.weights.tensors
        return tuple(
            Piece(t.name, 0, counting.matrix_size(t)[0], stored_bytes(t.shape, planned[t.name].format), t.num_runs)
            for t in tensors
            if planned[t.name].tier != "device"
        )

    layers = [counting.layer_matrices(model, layer) for layer in range(model.num_layers)]
    units = [Unit(i, "layer", i, pieces(tensors), computes=tuple(t.name for t in tensors)) for i, tensors in enumerate(layers)]
    rows = counting.matrix_size(model.head)[0]
    return (*units, Unit(len(units), "head", None, pieces((model.head,)), 0, rows))


def task_structure(model: ModelShape, decision: Decision, num_batches: int, num_steps: int) -> list[list[UnitWork]]:
    """The units of each step: every layer, and the output head."""
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
    return [*units, head]


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
