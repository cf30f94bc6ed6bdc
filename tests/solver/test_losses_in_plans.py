"""Measured losses bound what a class of quality may choose, on machines with and without a device, and stand in the plan."""

from __future__ import annotations

import pytest

from lmoffload_solver.loss import Loss, LossTable, MeasuredText
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import plan_in
from lmoffload_solver.plan import Named, Plan
from lmoffload_solver.search import solve
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits
from tests.solver.device_toys import make_device_machine
from tests.solver.toys import MIB, make_machine, make_model, make_work

MODEL = make_model(8, 256, 512, stored="bf16")
HOST = make_machine(64 * MIB, disk_bytes_per_s=1e6, base_bytes=4 * MIB, formats=("bf16", "int8", "int4-g64", "int4-g32"))
DEVICE = make_device_machine(4 * MIB, 64 * MIB, link=1e7)


def table(**losses: float) -> LossTable:
    """Losses of weights by format, its dash left out."""
    names = {"int8": "int8", "g64": "int4-g64", "g32": "int4-g32"}
    found = [
        Loss(what="weights", format=names[name], activations="fp32", perplexity=20 * (1 + loss), loss=loss, equal_tokens=0.9)
        for name, loss in losses.items()
    ]
    named = Named(name="toy", digest=MODEL.fingerprint())
    return LossTable(model=named, text=MeasuredText(name="t", digest="0", tokens=9), reference_perplexity=20, losses=tuple(found))


def planned(machine: MachineProfile, quality: Quality, losses: LossTable | None, model: ModelShape = MODEL) -> Plan:
    work = make_work(8, 16, 6).model_copy(update={"quality": quality})
    plan = plan_in(solve(model, machine, work, Limits(weights_memory_share=0.4, solve_s=60.0), losses=losses))
    assert plan is not None
    return plan


@pytest.mark.parametrize("machine", [HOST, DEVICE], ids=["host", "device"])
def test_a_format_beyond_its_bound_is_not_offered(machine: MachineProfile) -> None:
    free = planned(machine, "int4", None)
    assert free.weights.format["mlp"] == "int4-g64"
    assert free.loss is None, "nothing was measured"
    bound = planned(machine, "int4", table(g64=0.12, g32=0.08, int8=0.004))
    assert bound.weights.format["mlp"] == "int4-g32"
    neither = planned(machine, "int4", table(g64=0.12, g32=0.11, int8=0.004))
    assert neither.weights.format["mlp"] == "int8"
    assert neither.loss == pytest.approx(0.004)


def test_parts_together_stay_within_the_bound() -> None:
    """Each of two formats alone would do, but not both: a plan has one of them."""
    plan = planned(HOST, "int4", table(g64=0.099, g32=0.2, int8=0.002))
    assert "int8" not in plan.weights.format.values() or "int4-g64" not in plan.weights.format.values()
    assert plan.loss is not None
    assert plan.loss <= 0.10


def test_what_a_looser_class_would_lose_is_told() -> None:
    plan = planned(HOST, "exact", table(int8=0.004, g64=0.05))
    told = {looser.quality: looser.loss for looser in plan.looser_quality}
    assert plan.loss == 0
    assert told["int8"] == pytest.approx(0.004)
