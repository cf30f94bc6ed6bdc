"""Policies of systems that need no device: plans that hold, and that the planner's own is never slower than."""

from __future__ import annotations

import pytest

from lmoffload_solver.errors import InfeasibleError
from lmoffload_solver.outcome import plan_in
from lmoffload_solver.policies.on_host import price_on_host
from lmoffload_solver.search import solve
from lmoffload_solver.soundness import check_plan
from lmoffload_solver.workload import Limits
from tests.solver.toys import MIB, make_machine, make_model, make_work

MODEL, MACHINE, WORK = make_model(6, 128, 256), make_machine(24 * MIB, base_bytes=4 * MIB), make_work(8, 16, 6)
LIMITS = Limits(weights_memory_share=0.5)


@pytest.mark.parametrize("policy", ["accelerate", "zero-inference"])
def test_a_policy_is_a_sound_plan_and_no_better_than_ours(policy: str) -> None:
    plan = price_on_host(policy, MODEL, MACHINE, WORK, LIMITS)
    check_plan(MODEL, plan)
    ours = plan_in(solve(MODEL, MACHINE, WORK, LIMITS))
    assert ours is not None
    assert plan.predicted.total_s >= ours.predicted.total_s * (1 - 1e-9)
    assert plan.num_micro_batches == 1
    assert plan.policy == policy


def test_a_device_map_fills_whole_layers_in_order() -> None:
    plan = price_on_host("accelerate", MODEL, MACHINE, WORK, LIMITS)
    tiers = [{plan.weights.tensors[f"{layer}.{name}"].tier for name in ("q", "k", "v", "o", "gate", "up", "down")} for layer in range(6)]
    assert all(len(of_layer) == 1 for of_layer in tiers), "a layer is whole"
    order = ["host" in of_layer for of_layer in tiers]
    assert order == sorted(order, reverse=True), "the first layers are at home"
    assert 0 < sum(order) < 6
    assert plan.prefetch_depth == 0


def test_parameters_in_the_slow_tier() -> None:
    plan = price_on_host("zero-inference", MODEL, MACHINE, WORK, LIMITS)
    assert all(tensor.tier == "disk" for name, tensor in plan.weights.tensors.items() if MODEL.by_name[name].is_matrix)
    assert plan.prefetch_depth == 1


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match="fits no batch"):
        price_on_host("zero-inference", MODEL, make_machine(5 * MIB, base_bytes=4 * MIB), WORK, Limits())
