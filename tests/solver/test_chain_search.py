"""The search with a device: goals, limits, outcomes, what is decided."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lmoffload_solver import counting
from lmoffload_solver.chain_domain import ChainCandidate
from lmoffload_solver.chain_plan import decision_of
from lmoffload_solver.chain_predict import costs_of, simulate_chain
from lmoffload_solver.chain_rounding import Rooms
from lmoffload_solver.chain_search import ChainSearch
from lmoffload_solver.decision import Job, KVUnit
from lmoffload_solver.device_memory import ChainMemory
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.outcome import Infeasible, Optimal, plan_in
from lmoffload_solver.plan import Plan
from lmoffload_solver.search import solve
from lmoffload_solver.what_if import Change, what_if
from lmoffload_solver.workload import Limits, PromptGroup, Workload
from tests.solver.device_toys import make_device_machine
from tests.solver.toys import MIB, make_model, make_work


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
    assert plan.gap == 0
    assert [looser.quality for looser in plan.looser_quality] == ["int8", "int4"]
    rates = {looser.quality: (looser.tokens_per_s, looser.loss) for looser in plan.looser_quality}
    assert all(loss is None or rate <= plan.predicted.tokens_per_s * (1 + 1e-9) for rate, loss in rates.values()), "unknown is not zero"


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


def test_the_host_is_short_of_a_buffer_for_what_comes_from_the_disk() -> None:
    """The disk has room for everything: what is said to be missing is enough, and no more than a layer too much."""
    model, machine, work = make_model(6, 256, 512, stored="bf16"), make_device_machine(3 * MIB), make_work(4, 64, 8)
    layer = sum(counting.tensor_bytes(tensor) for tensor in counting.layer_matrices(model, 0))
    least = next(n for n in range(1, 4000) if isinstance(solve(model, machine, work, Limits(host_memory_bytes=n * 2**14)), Optimal)) * 2**14
    for host in (least - 2**14, least - 2**17, least // 2):
        outcome = solve(model, machine, work, Limits(host_memory_bytes=host))
        assert isinstance(outcome, Infeasible) and outcome.resource == "host memory"
        assert least <= host + outcome.short_by_bytes + 2**14 <= least + layer + 2**14
        assert isinstance(solve(model, machine, work, Limits(host_memory_bytes=host + outcome.short_by_bytes)), Optimal)


def test_what_if_solves_again() -> None:
    model, machine = make_model(6, 256, 512, stored="bf16"), make_device_machine(2 * MIB + MIB // 2)
    plan = solved(machine, count=3, length=64, gen_len=6)
    changes = (Change(resource="link", factor=2.0), Change(resource="device_memory", added_bytes=2 * MIB))
    told = what_if(model, machine, plan, changes)
    assert told.tokens_per_s == pytest.approx(plan.predicted.tokens_per_s)
    assert all(answer.gain is not None and answer.gain >= -1e-3 for answer in told.answers)
    assert told.together is not None
    assert told.answers[0].tokens_per_s is not None
    assert told.together >= told.answers[0].tokens_per_s * (1 - 1e-3)


def test_a_hundred_layers_are_planned_within_a_second_of_the_processor() -> None:
    """Three tiers, every format, full search: `benchmarks/planner.py` measures it alone on the machine; here others may slow it."""
    from benchmarks.planner import CASES, measured

    measured(replace(CASES[0], model="opt-6.7b"), 1)  # what is imported once
    figure = measured(CASES[0], 2)
    assert figure.outcome == "optimal"
    assert figure.gap <= 0.02
    assert figure.processor_s < 1.5


def test_weights_memory_is_kept() -> None:
    """Homes and buffers of weights on device and host together."""
    model, machine = make_model(6, 256, 512, stored="bf16"), make_device_machine(8 * MIB)
    free = solved(machine, count=4, length=64, gen_len=8)
    total = sum(free.weights.bytes.values())
    assert free.weights.bytes["disk"] == 0
    for limits in (Limits(weights_memory_share=0.6), Limits(weights_memory_bytes=total // 2)):
        plan = solved(machine, limits, count=4, length=64, gen_len=8)
        decision = decision_of(model, plan)
        memory = ChainMemory(Job(model, plan.workload), machine, limits)
        granted = total // 2 if limits.weights_memory_bytes else 0.6 * total
        assert memory.weights_memory(decision) <= granted
        assert plan.weights.bytes["disk"] > 0
        assert plan.predicted.tokens_per_s < free.predicted.tokens_per_s
    outcome = solve(model, machine, make_work(4, 64, 8), Limits(weights_memory_bytes=MIB // 8))
    assert isinstance(outcome, Infeasible)
    assert outcome.resource == "weights memory"


def test_threads_granted_are_not_exceeded_and_cost_what_they_cost() -> None:
    """The host attends where it is quicker than the device, as it is with enough threads."""
    model = make_model(4, 256, 512, stored="bf16")
    machine = make_device_machine(16 * MIB, 32 * MIB, link=1e10, host_attention=4e10, cores=16).model_copy(update={"attention": ()})
    work = make_work(4, 512, 8)
    rates = []
    for threads in (3, 6, None):
        plan = plan_in(solve(model, machine, work, Limits(threads=threads, micro_batch=1, num_micro_batches=2)))
        assert plan is not None
        rates.append(plan.predicted.tokens_per_s)
        assert sum(plan.threads.values()) <= (threads or 16)
        again = simulate_chain(Job(model, work), costs_of(machine, decision_of(model, plan)), decision_of(model, plan))
        assert again.total_s == pytest.approx(plan.predicted.total_s, rel=1e-9)
    assert plan.attention.host_share > 0
    assert rates == sorted(rates)
    assert rates[0] < rates[-1], "attention is slower with fewer threads"


def test_formats_of_head_and_table_and_kernels_are_decisions() -> None:
    """A head that streams is quantized where that is allowed, though the layers are resident; products say how they take weights."""
    model = make_model(2, 256, 512, vocab=20000, stored="bf16")
    work = make_work(2, 16, 8).model_copy(update={"quality": "int4"})
    machine = make_device_machine(9 * MIB, 64 * MIB, link=1e8)
    plan = plan_in(solve(model, machine, work, Limits()))
    assert plan is not None
    assert plan.weights.format["head"] == "int4-g64"
    assert plan.weights.format["embedding"] == "bf16", "it costs no time, and the host has room"
    assert {plan.kernels.prefill, plan.kernels.decode} <= {"widen", "dequantizing"}
    small = plan_in(solve(model, machine, work, Limits(host_memory_bytes=9 * MIB)))
    assert small is not None
    assert small.weights.format["embedding"] == "int4-g64", "the table in 16 bits takes 10 MB"


def test_blocks_are_timed_by_their_own_prompts() -> None:
    """Longest first; each block's mean, and means of squares in attention: hand-computed for two lengths."""
    model = make_model(2, 256, 512, stored="bf16")
    work = Workload(prompts=(PromptGroup(length=16, count=4), PromptGroup(length=128, count=4)), gen_len=4)
    job = Job(model, work)
    assert [(block.first, block.end) for block in job.blocks(2, 1)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    sizes = [job.size(block, 0).tokens for block in job.blocks(4, 1)]
    assert sizes == [512, 64]
    (whole,) = job.blocks(8, 1)
    assert job.size(whole, 0).tokens == 8 * 72
    assert job.lengths.kept(32, 0, 0, 8) == pytest.approx((32 + 16) / 2)
    pairs = job.lengths.mean("squares", lambda lengths: lengths**2, 2, 6)
    assert pairs == pytest.approx((128**2 + 16**2) / 2)


@pytest.mark.parametrize("seed", range(12))
def test_even_residency_beats_contiguous_or_ties(seed: int) -> None:
    """The same number of layers on the device, spread or the first ones, everything else equal."""
    chance = random.Random(seed)
    model = make_model(24, 128, 256, stored="bf16")
    machine = make_device_machine(64 * MIB, link=chance.choice([1e8, 1e9]), flops=chance.choice([1e9, 1e10]))
    job = Job(model, make_work(4, 32, 6))
    search = ChainSearch(job, machine, machine.disks[0], Limits(), "exact", float("inf"))
    candidate = ChainCandidate(2, 2, (), "bf16", "device", prefetch_depth=chance.choice([1, 2]))
    resident = chance.randint(4, 20)
    layer = sum(t.shape[0] * t.shape[1] * 2 for t in model.by_layer[0] if t.is_matrix)
    kv = ((KVUnit("device", "device"),) * 2,) * 24
    placer = search.domain.placer(())
    rooms = Rooms(resident * layer + candidate.slots * layer + placer.other_bytes["device"], 64 * MIB, 0.0)
    seconds = {}
    for homes in [*placer.fill(rooms, candidate.slots), *placer.fill(rooms, candidate.slots, first_whole=True)]:
        spread = search.decision(candidate, homes, kv)
        seconds["even"] = min(seconds.get("even", 9e9), simulate_chain(job, costs_of(machine, spread), spread).total_s)
        on_device = sum(home == "device" for name, home in homes.items() if name in {t.name for t in search.domain.placed})
    names = [t.name for t in search.domain.placed]
    first = {**homes, **{name: "device" if place < on_device else "host" for place, name in enumerate(names)}}
    contiguous = search.decision(candidate, first, kv)  # type: ignore[arg-type]
    assert seconds["even"] <= simulate_chain(job, costs_of(machine, contiguous), contiguous).total_s * (1 + 1e-9)
