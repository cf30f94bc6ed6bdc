"""The search with a device: bounds hold, small instances against every placement, prices, goals, outcomes."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest

from lmoffload_solver.chain_plan import decision_of
from lmoffload_solver.chain_predict import costs_of, simulate_chain
from lmoffload_solver.chain_program import ChainProgram
from lmoffload_solver.chain_search import PROOF, ChainCandidate, ChainSearch
from lmoffload_solver.chain_solve import memory_prices, waiting_s
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.outcome import Infeasible, Optimal, plan_in
from lmoffload_solver.plan import Plan
from lmoffload_solver.search import solve
from lmoffload_solver.value import Tier, read_value
from lmoffload_solver.what_if import Change, changed, what_if
from lmoffload_solver.workload import Limits
from tests.solver.device_toys import make_device_machine
from tests.solver.toys import MIB, make_model, make_work

TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def tiny_model(layers: int = 2, hidden: int = 256) -> ModelShape:
    """One matrix of attention and one of the MLP a layer, a tied table."""
    tensors = [TensorShape(name="embed", shape=(128, hidden), format="fp16", tensor_class="embedding", is_matrix=True)]
    for i in range(layers):
        tensors.append(
            TensorShape(name=f"{i}.qkvo", shape=(4 * hidden, hidden), format="fp16", tensor_class="attention", layer=i, is_matrix=True)
        )
        tensors.append(TensorShape(name=f"{i}.mlp", shape=(8 * hidden, hidden), format="fp16", tensor_class="mlp", layer=i, is_matrix=True))
    shape = LayerShape(num_heads=4, num_kv_heads=4, key_dim=hidden // 4, value_dim=hidden // 4)
    return ModelShape(
        name=f"tiny{layers}",
        model_type="opt",
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        vocab_size=128,
        layers=(shape,) * layers,
        tensors=tuple(tensors),
        tied_head=True,
    )


def random_instance(seed: int) -> tuple[Job, MachineProfile, Limits]:
    chance = random.Random(seed)
    model = tiny_model(2)
    job = Job(model, make_work(chance.choice([1, 2, 4]), chance.choice([16, 64, 256]), chance.choice([2, 4])))
    machine = make_device_machine(
        int(chance.uniform(1.2, 8) * MIB),
        32 * MIB,
        link=chance.choice([2e8, 1e9, 5e9]),
        disk=1e8,
        host_attention=chance.choice([1e8, 1e9]),
        flops=chance.choice([1e10, 1e11]),
        slowdown=chance.choice([1.0, 1.4, 2.0]),
    )
    return job, machine, Limits(num_micro_batches=chance.choice([1, 2]))


def every_decision(search: ChainSearch, candidate: ChainCandidate) -> list[Decision]:
    """All placements of whole tensors and whole units of KV, on device and host (disk is never needed here)."""
    names = [t.name for t in search.model.tensors if t.is_matrix]
    units = (KVUnit("device", "device"), KVUnit("host", "device"), KVUnit("host", "host"))
    count = min(candidate.num_micro_batches, -(-search.job.num_prompts // candidate.micro_batch))
    found = []
    for tiers in itertools.product(TIERS[:2], repeat=len(names)):
        for kv in itertools.product(units, repeat=count * search.model.num_layers):
            per_layer = tuple(tuple(kv[i * count : (i + 1) * count]) for i in range(search.model.num_layers))
            full = tuple(layer + (layer[-1],) * (candidate.num_micro_batches - count) for layer in per_layer)
            decision = search.decision(candidate, dict(zip(names, tiers, strict=True)), full)
            if search.memory.fits(decision):
                found.append(decision)
    return found


@pytest.mark.parametrize("seeds", [range(0, 4), range(4, 8)])
def test_small_instances_against_every_placement(seeds: range) -> None:
    """The program is below every whole placement, and so few are looked at one by one: the search's plan is the best of them."""
    losses = []
    for seed in seeds:
        job, machine, limits = random_instance(seed)
        search = ChainSearch(job, machine, machine.disks[0], limits, "exact", float("inf"), proof=0.0)
        found = search.run()
        if found is None:
            assert not any(every_decision(search, candidate) for _, candidate in search.bounds()), seed
            continue
        best = float("inf")
        for bound, candidate in search.bounds():
            if bound > best:
                continue
            solution = ChainProgram(search.choices(candidate)).solve()
            if solution is None or solution.total_s > best:
                continue
            assert bound <= solution.total_s * (1 + 1e-3)
            decisions = every_decision(search, candidate)
            times = [simulate_chain(job, search.costs, d).total_s for d in random.Random(seed).sample(decisions, min(60, len(decisions)))]
            assert all(solution.total_s <= seconds * (1 + 1e-6) for seconds in times), (seed, candidate)
            best = min([best, *times])
        losses.append(found.simulated.total_s / best - 1)
    assert max(losses) <= 1e-6, losses


def solved(machine: MachineProfile, limits: Limits | None = None, **work: int) -> Plan:
    outcome = solve(make_model(6, 256, 512, stored="bf16"), machine, make_work(**work), limits or Limits())
    assert isinstance(outcome, Optimal)
    return outcome.plan


def test_a_plan_says_what_it_was_made_of() -> None:
    model = make_model(6, 256, 512, stored="bf16")
    plan = solved(make_device_machine(3 * MIB), count=16, length=64, gen_len=8)
    read = Plan.model_validate_json(plan.model_dump_json())
    decision = decision_of(model, read)
    job, machine = Job(model, plan.workload), make_device_machine(3 * MIB)
    again = simulate_chain(job, costs_of(machine, decision), decision)
    assert again.total_s == pytest.approx(plan.predicted.total_s, rel=1e-12)
    assert plan.predicted.peak_bytes["device"] <= 3 * MIB
    assert sum(plan.weights.bytes.values()) == sum(decision.tensor_bytes(t) for t in model.tensors)
    assert {tensor.format for tensor in plan.weights.tensors.values()} == {"bf16"}, "nothing lossy unasked"
    assert plan.gap <= PROOF + 1e-5
    assert [looser.quality for looser in plan.looser_quality] == ["int8", "int4"]
    assert all(looser.loss is None for looser in plan.looser_quality), "unknown is not zero"


@pytest.mark.parametrize("seed", range(8))
def test_more_of_anything_is_never_slower(seed: int) -> None:
    chance = random.Random(seed)
    machine = make_device_machine(int(chance.uniform(2, 6) * MIB), 48 * MIB, link=chance.choice([3e8, 2e9]))
    job = Job(make_model(4, 256, 512, stored="bf16"), make_work(4, 64, 6))

    def rate(on: MachineProfile) -> float:
        found = ChainSearch(job, on, on.disks[0], Limits(), "exact", float("inf")).run()
        assert found is not None
        return job.tokens / found.simulated.total_s

    base = rate(machine)
    for change in (
        Change(resource="device_memory", added_bytes=MIB),
        Change(resource="host_memory", added_bytes=8 * MIB),
        Change(resource="link", factor=1.5),
        Change(resource="disk", factor=1.5),
        Change(resource="cores", factor=1.5),
    ):
        assert rate(changed(machine, Limits(), change)[0]) >= base * (1 - 2 * PROOF), change


def test_prices_against_one_per_cent_more() -> None:
    """Duals times 1 % of a resource are what the program gains, the discrete choices fixed: within 2 % of the gain, on 50 instances."""
    checked = 0
    for seed in range(160):
        _, machine, limits = random_instance(seed)
        chance = random.Random(seed)
        job = Job(make_model(6, 256, 512, stored="bf16"), make_work(chance.choice([2, 8]), chance.choice([16, 64, 256]), 4))
        search = ChainSearch(job, machine, machine.disks[0], limits, "exact", float("inf"))
        bounds = list(search.bounds())
        if not bounds or checked == 50:
            continue
        candidate = chance.choice(bounds)[1]
        choices = search.choices(candidate)
        solution = ChainProgram(choices).solve()
        if solution is None:
            continue
        room = choices.rooms["device"]
        more = ChainProgram(replace_room(choices, room * 1.01)).solve()
        less = ChainProgram(replace_room(choices, room * 1.0001)).solve()
        assert more is not None
        assert less is not None
        by_dual = memory_prices(solution)["device"] * room * 0.01
        gained = solution.total_s - more.total_s
        same_basis = abs((solution.total_s - less.total_s) * 100 - gained) < 0.02 * max(gained, 1e-12)
        if gained > 1e-6 * solution.total_s and same_basis:
            assert by_dual == pytest.approx(gained, rel=0.02), seed
            checked += 1
        assert waiting_s(choices, solution, "upload") <= solution.total_s * (1 + 1e-9)
    assert checked == 50


def replace_room(choices, room: float):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(choices, rooms=choices.rooms | {"device": room})


def test_latency_takes_one_sequence_at_a_time_and_deadline_the_best_class() -> None:
    model, machine = make_model(6, 256, 512, stored="bf16"), make_device_machine(3 * MIB)
    work = make_work(3, 64, 8)
    quick = plan_in(solve(model, machine, work.model_copy(update={"goal": "latency"}), Limits()))
    assert quick is not None
    assert (quick.micro_batch, quick.num_micro_batches, quick.goal) == (1, 1, "latency")
    exact = plan_in(solve(model, machine, work, Limits()))
    assert exact is not None
    late = work.model_copy(update={"goal": "deadline", "deadline_s": exact.predicted.total_s * 2})
    in_time = plan_in(solve(model, machine, late, Limits()))
    assert in_time is not None
    assert (in_time.quality, in_time.goal) == ("exact", "deadline")
    tight = plan_in(solve(model, machine, late.model_copy(update={"deadline_s": exact.predicted.total_s * 0.98}), Limits()))
    assert tight is not None
    assert tight.quality != "exact"
    assert tight.predicted.total_s <= exact.predicted.total_s * 0.98
    never = solve(model, machine, late.model_copy(update={"deadline_s": 1e-6}), Limits())
    assert isinstance(never, Infeasible)
    assert never.resource == "time"
    with pytest.raises(StatedError, match="--deadline"):
        solve(model, machine, late.model_copy(update={"deadline_s": None}), Limits())


def test_what_does_not_fit_names_the_memory() -> None:
    model, work = make_model(6, 256, 512, stored="bf16"), make_work(4, 256, 8)
    for machine, limits, resource in (
        (make_device_machine(MIB // 4), Limits(), "device memory"),
        (make_device_machine(2 * MIB), Limits(host_memory_bytes=MIB // 2), "host memory"),
        (make_device_machine(3 * MIB, 2 * MIB), Limits(disk_space_bytes=0), "disk space"),
    ):
        outcome = solve(model, machine, work, limits)
        assert isinstance(outcome, Infeasible), resource
        assert outcome.resource == resource
        assert outcome.short_by_bytes > 0
        assert "bytes" in outcome.what_would_help
    with pytest.raises(StatedError, match="--device-memory"):
        solve(model, make_device_machine(), work, Limits(weights_memory_share=0.5))


def test_what_if_solves_again() -> None:
    model, machine = make_model(6, 256, 512, stored="bf16"), make_device_machine(2 * MIB + MIB // 2)
    plan = solved(machine, count=3, length=64, gen_len=6)
    changes = (Change(resource="link", factor=2.0), Change(resource="device_memory", added_bytes=2 * MIB))
    told = what_if(model, machine, plan, changes)
    assert told.tokens_per_s == pytest.approx(plan.predicted.tokens_per_s)
    assert all(answer.gain is not None and answer.gain >= -PROOF for answer in told.answers)
    assert told.together is not None
    assert told.answers[0].tokens_per_s is not None
    assert told.together >= told.answers[0].tokens_per_s * (1 - PROOF)


def test_a_hundred_layers_are_planned_in_about_a_second() -> None:
    model = make_model(100, 12288, 49152, 96, 96, 50000, stored="bf16")
    machine = read_value(MachineProfile, Path(__file__).parents[2] / "profiles" / "t4-gcp.json", "profile")
    work = make_work(256, 512, 32).model_copy(update={"quality": "any"})
    solve(tiny_model(), make_device_machine(), make_work(1, 8, 2), Limits())  # what is imported once
    begin = time.perf_counter()
    outcome = solve(model, machine, work, Limits())
    seconds = time.perf_counter() - begin
    assert isinstance(outcome, Optimal)
    assert seconds < 4, "about a second on a quiet machine"
