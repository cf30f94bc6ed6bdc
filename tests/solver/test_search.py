"""The search: what it promises of its outcome, and that it finds what trying everything finds."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lmoffload_solver import memory
from lmoffload_solver.blocks import Step, decode_steps
from lmoffload_solver.bounds import Bounds
from lmoffload_solver.candidate import Domain
from lmoffload_solver.costs import disk_of
from lmoffload_solver.errors import StatedError
from lmoffload_solver.evaluate import Evaluator
from lmoffload_solver.explain import candidate_of, explain
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.prices import Prices
from lmoffload_solver.program import Program
from lmoffload_solver.search import Infeasible, Optimal, TimedOut, solve
from lmoffload_solver.simulate import step_ends
from lmoffload_solver.soundness import check_plan
from lmoffload_solver.timeline import PlanCosts, block_timeline
from lmoffload_solver.value import Quality, parse_value
from lmoffload_solver.variants import Variant, offered
from lmoffload_solver.workload import Limits, PromptGroup, Workload
from tests.solver.host_instances import every_candidate
from tests.solver.toys import MIB, make_machine, make_model, make_work

BASE = 2 * MIB

models = st.builds(
    make_model,
    num_layers=st.integers(1, 6),
    hidden=st.sampled_from([64, 128]),
    intermediate=st.sampled_from([96, 256]),
    vocab=st.sampled_from([100, 3000]),
    stored=st.sampled_from(["fp32", "bf16"]),
    tied=st.booleans(),
    windows=st.sampled_from([(None,), (None, 9)]),
)
machines = st.builds(
    make_machine,
    st.integers(10 * MIB, 20 * MIB),
    disk_bytes_per_s=st.sampled_from([1e7, 1e8, 1e9]),
    flops_per_s=st.sampled_from([1e9, 1e10]),
    cores=st.integers(1, 2),
    base_bytes=st.just(BASE),
    slowdowns=st.sampled_from([None, (1.05, 1.2), (2.5, 1.5)]),
)
quantizing_machines = st.builds(
    make_machine,
    st.integers(4 * MIB, 12 * MIB),
    disk_bytes_per_s=st.sampled_from([1e7, 1e8, 1e9]),
    flops_per_s=st.sampled_from([1e9, 1e10]),
    base_bytes=st.just(BASE),
    formats=st.just(("fp32", "bf16", "int8", "int4-g32")),
    speeds=st.fixed_dictionaries({"int8": st.sampled_from([0.5, 1.0, 3.0]), "int4-g32": st.sampled_from([0.5, 1.0, 3.0])}),
    kv_formats=st.just(("fp32", "bf16")),
)
works = st.builds(
    lambda groups, gen_len: Workload(prompts=tuple(PromptGroup(length=n, count=c) for n, c in groups), gen_len=gen_len),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=3),
    st.integers(1, 12),
)
small_works = st.builds(make_work, st.integers(1, 7), st.integers(1, 60), st.integers(1, 9))
all_limits = st.builds(
    Limits,
    weights_memory_share=st.sampled_from([None, 0.1, 0.4, 0.8]),
    host_memory_bytes=st.sampled_from([None, 13 * MIB]),
    micro_batch=st.sampled_from([None, 3]),
    num_micro_batches=st.sampled_from([None, 2]),
)
slow = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(models, machines, works, all_limits)
def test_a_plan_fits_or_what_is_short_is_said(model: ModelShape, machine: MachineProfile, work: Workload, limits: Limits) -> None:
    outcome = solve(model, machine, work, limits)
    if isinstance(outcome, Infeasible):
        assert_infeasible_by(outcome, model, machine, work, limits)
        return
    assert isinstance(outcome, Optimal)
    plan = outcome.plan
    capacity = memory.Capacity.of(model, machine, limits)
    assert memory.peak(model, plan) == plan.predicted.peak_bytes["host"] <= capacity.memory_bytes
    if capacity.weights_bytes is not None:
        parts = memory.breakdown(model, plan)
        assert parts["weights"] + parts["ring"] + parts["vectors"] <= capacity.weights_bytes
    assert plan.gap == pytest.approx(1 - plan.predicted.tokens_per_s / plan.bound_tokens_per_s, abs=1e-12)
    assert plan.gap >= 0
    assert set(plan.weights.tensors) == {tensor.name for tensor in model.tensors}
    assert len(plan.kv.homes) == model.num_layers * plan.num_micro_batches
    assert parse_value(Plan, plan.model_dump_json(), "plan") == plan
    if limits.micro_batch is not None:
        assert plan.micro_batch == min(limits.micro_batch, work.num_prompts)


def assert_infeasible_by(outcome: Infeasible, model: ModelShape, machine: MachineProfile, work: Workload, limits: Limits) -> None:
    """With what was short there is a plan; with one byte less there is none."""
    assert outcome.short_by_bytes > 0
    if outcome.resource == "weights memory":
        weights = memory.Capacity.of(model, machine, limits).weights_bytes
        assert weights is not None
        fixed = limits.model_copy(update={"weights_memory_share": None, "weights_memory_bytes": weights + outcome.short_by_bytes})
        one_less = fixed.model_copy(update={"weights_memory_bytes": weights + outcome.short_by_bytes - 1})
        again = solve(model, machine, work, fixed)
        assert isinstance(again, Optimal) or again.resource == "host memory"
        assert isinstance(solve(model, machine, work, one_less), Infeasible)
        return
    needed = memory.Capacity.of(model, machine, limits).memory_bytes + outcome.short_by_bytes
    host = machine.host.model_copy(update={"memory_usable_bytes": needed})
    more = limits.model_copy(update={"host_memory_bytes": None})
    again = solve(model, machine.model_copy(update={"host": host}), work, more)
    assert isinstance(again, Optimal) or again.resource == "weights memory"
    less = limits.model_copy(update={"host_memory_bytes": needed - 1})
    assert isinstance(solve(model, machine.model_copy(update={"host": host}), work, less), Infeasible)


@settings(slow, max_examples=6)
@given(models, machines, small_works)
def test_search_finds_what_trying_everything_finds(model: ModelShape, machine: MachineProfile, work: Workload) -> None:
    check_against_everything(model, machine, work, Limits(threads=1))


@settings(slow, max_examples=6)
@given(models, quantizing_machines, small_works, st.sampled_from(["int8", "int4", "any"]), st.booleans())
def test_with_every_format_too(model: ModelShape, machine: MachineProfile, work: Workload, quality: Quality, one: bool) -> None:
    limits = Limits(micro_batch=4, num_micro_batches=1 if one else 2, threads=1)
    check_against_everything(model, machine, work.model_copy(update={"quality": quality}), limits)


@settings(slow, max_examples=12)
@given(
    st.builds(make_model, st.integers(1, 4), intermediate=st.sampled_from([96, 256]), num_kv_heads=st.sampled_from([2, 4])),
    st.builds(
        make_machine,
        st.integers(5 * MIB, 11 * MIB),
        disk_bytes_per_s=st.sampled_from([1e8, 1e9]),
        flops_per_s=st.sampled_from([1e9, 1e10]),
        base_bytes=st.just(BASE),
        slowdowns=st.sampled_from([None, (1.05, 1.2), (2.5, 1.5)]),
    ),
    st.builds(make_work, st.integers(2, 6), st.sampled_from([60, 200, 500]), st.integers(1, 5)),
    st.integers(1, 2),
)
def test_with_prompts_in_chunks_and_keys_and_values_on_the_disk(
    model: ModelShape, machine: MachineProfile, work: Workload, size: int
) -> None:
    limits = Limits(threads=1, micro_batch=size, num_micro_batches=3)
    check_against_everything(model, machine, work, limits)
    outcome = solve(model, machine, work, limits)
    assume(isinstance(outcome, Optimal))
    check_plan(model, outcome.plan)
    assert memory.peak(model, outcome.plan) == outcome.plan.predicted.peak_bytes["host"]
    if outcome.plan.micro_batch * outcome.plan.num_micro_batches >= work.num_prompts:
        check_walk(model, machine, outcome.plan)


def check_against_everything(model: ModelShape, machine: MachineProfile, work: Workload, limits: Limits) -> None:
    """The search's plan is the best of all placements that rounding tries for all candidates, and every bound is one (of all placements
    there are: `test_host_exact`)."""
    outcome = solve(model, machine, work, limits)
    prices, domain = Prices(model, machine, disk_of(machine, None), work, limits), Domain.of(model, machine, work, limits)
    choices = offered(model, machine, domain.threads, work.quality, None)
    best, count = float("inf"), 0
    for evaluator, candidate in every_candidate(prices, domain, choices):
        count += 1
        bound = evaluator.bound_s(candidate)
        for placement in evaluator.placements(candidate):
            total = evaluator.simulate(candidate, placement).total_s
            assert bound <= total * (1 + 1e-9), "the bound goes no higher than what is simulated"
            best = min(best, total)
    if isinstance(outcome, Infeasible):
        assert best == float("inf")
    else:
        assert isinstance(outcome, Optimal)
        assert outcome.plan.predicted.total_s == pytest.approx(best, rel=1e-9)
    found = list(Bounds(prices, domain, choices))
    assert len(found) <= count
    for bound, candidate in found[:: max(1, len(found) // 50)]:
        assert bound == pytest.approx(Evaluator(prices, candidate.variant).bound_s(candidate), rel=1e-9), "the closed form in both its ways"


@slow
@given(models, machines, works)
def test_closed_form_program_and_simulation_are_in_order(model: ModelShape, machine: MachineProfile, work: Workload) -> None:
    outcome = solve(model, machine, work, Limits(weights_memory_share=0.6))
    assume(isinstance(outcome, Optimal))
    plan = outcome.plan
    evaluator = Evaluator(Prices(model, machine, disk_of(machine, None), work, Limits(weights_memory_share=0.6)), Variant())
    candidate = candidate_of(model, plan)
    closed = evaluator.bound_s(candidate)
    solution = Program(evaluator.program_choices(candidate)).solve()
    assert solution is not None
    whole = Program(evaluator.program_choices(candidate), whole=True).bound_s()
    assert whole is not None
    assert solution.total_s <= whole * (1 + 1e-6)
    assert max(closed, whole) <= plan.predicted.total_s * (1 + 1e-6)


@slow
@given(models, machines, st.integers(1, 20), st.integers(1, 30), st.integers(1, 6), st.sampled_from([0.2, 0.6]))
def test_a_plan_walked_task_by_task(
    model: ModelShape, machine: MachineProfile, count: int, length: int, gen_len: int, share: float
) -> None:
    """The search's unit-wise times are those of the schedule's tasks, for a job of one block."""
    outcome = solve(
        model, machine, make_work(count, length, gen_len), Limits(micro_batch=3, num_micro_batches=7, weights_memory_share=share)
    )
    assume(isinstance(outcome, Optimal))
    check_walk(model, machine, outcome.plan)


def check_walk(model: ModelShape, machine: MachineProfile, plan: Plan) -> None:
    """A plan of one block takes what its tasks take."""
    gen_len = plan.workload.gen_len
    costs = PlanCosts(model, machine, plan, steps=(Step(0, 1.0), *decode_steps(gen_len)))
    ends = step_ends(block_timeline(costs))
    spans = np.diff(ends, prepend=0.0) * [step.weight for step in costs.steps]
    assert plan.predicted.prefill_s == pytest.approx(spans[0])
    assert plan.predicted.decode_s == pytest.approx(spans[1:].sum())
    assert plan.predicted.step_s == pytest.approx(spans[1:].sum() / (gen_len - 1) if gen_len > 1 else 0)


@slow
@given(models, machines, works)
def test_more_memory_is_never_slower_in_the_bound(model: ModelShape, machine: MachineProfile, work: Workload) -> None:
    domain = Domain.of(model, machine, work, Limits(threads=1, num_micro_batches=3))
    host = machine.host.model_copy(update={"memory_usable_bytes": machine.host.memory_usable_bytes + MIB})
    exact = offered(model, machine, domain.threads, "exact", None)
    here, more = (
        {candidate: evaluator.bound_s(candidate) for evaluator, candidate in every_candidate(prices, domain, exact)}
        for m in (machine, machine.model_copy(update={"host": host}))
        for prices in (Prices(model, m, m.disks[0], work, Limits()),)
    )
    assert all(more[candidate] <= bound * (1 + 1e-12) for candidate, bound in here.items())


def test_keys_and_values_go_to_the_disk_where_memory_is_short() -> None:
    """Long contexts, little memory, a disk that is quick enough: their keys and values are loaded rather than weights streamed."""
    model, work = make_model(8, 256, 512, 8, 8), make_work(8, 400, 4)
    limits = Limits(micro_batch=2, num_micro_batches=4)
    short, ample = make_machine(46 * MIB, base_bytes=BASE, disk_bytes_per_s=1e9), make_machine(base_bytes=BASE, disk_bytes_per_s=1e9)
    outcome, resident = solve(model, short, work, limits), solve(model, ample, work, limits)
    assert isinstance(outcome, Optimal) and isinstance(resident, Optimal)
    plan = outcome.plan
    on_disk = plan.kv.bytes["disk"]
    assert on_disk and "disk" not in resident.plan.kv.bytes
    assert memory.peak(model, plan) == plan.predicted.peak_bytes["host"] <= 46 * MIB
    check_plan(model, plan)
    check_walk(model, short, plan)
    told = {other.change: other.tokens_per_s or 0.0 for other in explain(model, short, plan).alternatives}
    assert told["keys and values in memory"] < plan.predicted.tokens_per_s
    none = solve(model, short, work, limits.model_copy(update={"disk_space_bytes": 0}))
    if isinstance(none, Optimal):
        assert "disk" not in none.plan.kv.bytes and none.plan.predicted.total_s > plan.predicted.total_s
    less = solve(model, short, work, limits.model_copy(update={"disk_space_bytes": on_disk - 1}))
    assert isinstance(less, Infeasible) or less.plan.kv.bytes.get("disk", 0) < on_disk


def test_prompts_are_cut_where_memory_is_short() -> None:
    """Two prompts of 1,000 tokens: the temporaries of a layer over both leave no room for what otherwise stays at home."""
    model, work = make_model(8, 256, 512), make_work(2, 1000, 4)
    short, ample = make_machine(48 * MIB, base_bytes=BASE, disk_bytes_per_s=2e7), make_machine(base_bytes=BASE, disk_bytes_per_s=2e7)
    limits = Limits(micro_batch=1, num_micro_batches=2)
    outcome, whole = solve(model, short, work, limits), solve(model, ample, work, limits)
    assert isinstance(outcome, Optimal) and isinstance(whole, Optimal)
    assert outcome.plan.prefill_chunk is not None and whole.plan.prefill_chunk is None
    check_plan(model, outcome.plan)
    told = {other.change: other.tokens_per_s or 0.0 for other in explain(model, short, outcome.plan).alternatives}
    assert told["prompts whole"] < outcome.plan.predicted.tokens_per_s
    fixed = model.model_copy(update={"rotary_follows_length": True})
    uncut = solve(fixed, short, work, limits)
    assert isinstance(uncut, Optimal) and uncut.plan.prefill_chunk is None
    assert uncut.plan.predicted.total_s > outcome.plan.predicted.total_s
    check_walk(model, short, outcome.plan)


def test_choices_follow_the_machine() -> None:
    """Many rows: the kernel that is quick at many; one row: the other. Two threads beat one. A slow disk is read ahead."""
    model = make_model(8, 256, 512, stored="bf16")
    machine = make_machine(overheads=None)
    many = solve(model, machine, make_work(64, 64, 8), Limits(weights_memory_share=0.5))
    one = solve(model, machine, make_work(1, 1, 8), Limits(weights_memory_share=0.5))
    assert isinstance(many, Optimal)
    assert isinstance(one, Optimal)
    assert many.plan.kernels.prefill == "wide"
    assert one.plan.kernels.decode == "narrow"
    assert many.plan.threads == {"compute": 2, "disk_io": 2}
    assert many.plan.prefetch_depth >= 1
    assert many.plan.micro_batch * many.plan.num_micro_batches == 64, "one weight load serves all"
    assert one.plan.binding == "disk_read"
    prices = {price.resource: price.gain_tokens_per_s for price in one.plan.shadow_prices}
    assert prices["weights_memory"] > 0
    assert prices["disk_read"] > 0


def test_prices_are_those_of_a_little_more() -> None:
    """A dual times a small change is what solving again with that change gives in the bound."""
    model, work = make_model(8, 256, 512), make_work(1, 4, 8)
    limits = Limits(weights_memory_share=0.5)
    outcome = solve(model, make_machine(), work, limits)
    assert isinstance(outcome, Optimal)
    price = next(p for p in outcome.plan.shadow_prices if p.resource == "disk_read")
    tokens = 8

    def program(rate: float) -> float:
        machine = make_machine(disk_bytes_per_s=rate)
        evaluator = Evaluator(Prices(model, machine, machine.disks[0], work, limits), Variant())
        solution = Program(evaluator.program_choices(candidate_of(model, outcome.plan))).solve()
        assert solution is not None
        return tokens / solution.total_s

    gained = program(1.001e8) - program(1e8)
    assert price.gain_tokens_per_s * (0.98 * 0.001e8) / 1e9 == pytest.approx(gained, rel=0.01)


def test_fixed_choices_and_small_jobs() -> None:
    model, machine = make_model(), make_machine()
    fixed = solve(model, machine, make_work(12), Limits(micro_batch=5, num_micro_batches=2))
    assert isinstance(fixed, Optimal)
    assert (fixed.plan.micro_batch, fixed.plan.num_micro_batches) == (5, 2)
    small = solve(model, machine, make_work(3), Limits(micro_batch=5, num_micro_batches=2))
    assert isinstance(small, Optimal)
    assert (small.plan.micro_batch, small.plan.num_micro_batches) == (3, 1), "a block larger than the job is the job"
    one_thread = solve(model, machine, make_work(3), Limits(threads=1))
    assert isinstance(one_thread, Optimal)
    assert one_thread.plan.threads["compute"] == 1


def test_out_of_time() -> None:
    outcome = solve(make_model(), make_machine(), make_work(), Limits(solve_s=1e-9))
    assert outcome == TimedOut(None, outcome.bound)
    assert outcome.bound > 0


def test_only_one_token() -> None:
    outcome = solve(make_model(), make_machine(), make_work(gen_len=1), Limits(weights_memory_share=0.5))
    assert isinstance(outcome, Optimal)
    predicted = outcome.plan.predicted
    assert (predicted.decode_s, predicted.step_s, predicted.decode_tokens_per_s) == (0, 0, 0)
    assert predicted.tokens_per_s == pytest.approx(8 / predicted.prefill_s)


def test_unknown_format_disk_and_goal() -> None:
    with pytest.raises(StatedError, match="--deadline"):
        solve(make_model(), make_machine(), make_work().model_copy(update={"goal": "deadline"}), Limits())
    quick = solve(make_model(), make_machine(), make_work().model_copy(update={"goal": "latency"}), Limits())
    assert isinstance(quick, Optimal)
    assert (quick.plan.micro_batch, quick.plan.num_micro_batches) == (1, 1)
    with pytest.raises(StatedError, match="q8_0"):
        solve(make_model(stored="q8_0"), make_machine(), make_work(), Limits())
    with pytest.raises(StatedError, match="/elsewhere"):
        solve(make_model(), make_machine(), make_work(), Limits(), file_system="/elsewhere")


def test_an_80_layer_model_is_planned_quickly() -> None:
    """In a fresh interpreter, imports included; neither torch nor transformers nor scipy is loaded."""
    code = (
        "import sys\n"
        "from tests.solver.toys import make_machine, make_model, make_work\n"
        "from lmoffload_solver.search import Limits, solve\n"
        "model = make_model(80, 8192, 28672, 64, 8, 32000, stored='bf16')\n"
        "outcome = solve(model, make_machine(24 * 2**30), make_work(100, 512, 32), Limits())\n"
        "assert outcome.gap < 0.03, outcome.gap\n"
        "assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)\n"
    )
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = os.times()
    taken_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert taken_s < 6, "keys and values on the disk are tried, and chosen"


def test_a_looser_quality_that_is_not_made_use_of_is_told() -> None:
    work = make_work().model_copy(update={"quality": "int4"})
    outcome = solve(make_model(), make_machine(), work, Limits())
    assert isinstance(outcome, Optimal)
    assert any("the plan is exact" in remark for remark in outcome.plan.remarks)
