"""Explanations add up, and agree with the plan."""

from __future__ import annotations

import pytest

from lmoffload_solver.explain import Explanation, explain
from lmoffload_solver.outcome import Optimal
from lmoffload_solver.search import solve
from lmoffload_solver.workload import Limits
from tests.solver.device_toys import make_device_machine
from tests.solver.toys import MIB, make_machine, make_model, make_work


def explained(limits: Limits, **machine: float) -> tuple[Optimal, Explanation]:
    model, where = make_model(8, 256, 512), make_machine(24 * MIB, base_bytes=4 * MIB, **machine)  # type: ignore[arg-type]
    outcome = solve(model, where, make_work(8, 16, 6), limits)
    assert isinstance(outcome, Optimal)
    return outcome, explain(model, where, outcome.plan, limits=limits)


def test_a_disk_bound_plan() -> None:
    limits = Limits(weights_memory_share=0.5)
    outcome, told = explained(limits, disk_bytes_per_s=1e7)
    plan = outcome.plan
    assert told.decode.binding == "disk_read"
    assert told.decode.busy_s["disk_read"] + told.prefill.busy_s["disk_read"] == pytest.approx(plan.predicted.resources["disk_read"])
    assert told.prefill.seconds + told.decode.seconds == pytest.approx(plan.predicted.total_s, rel=1e-9)
    assert sum(told.memory_parts.values()) == plan.predicted.peak_bytes["host"] <= told.memory_usable_bytes
    assert told.program_tokens_per_s is not None
    assert told.program_tokens_per_s >= plan.predicted.tokens_per_s
    assert told.moved_bytes_per_step > 0


def test_alternatives_are_no_better() -> None:
    outcome, told = explained(Limits(weights_memory_share=0.5))
    best = outcome.plan.predicted.tokens_per_s
    priced = {alternative.change: alternative.tokens_per_s for alternative in told.alternatives}
    assert "half the micro-batch" in priced
    assert "no reading ahead" in priced
    assert all(rate is None or rate <= best * (1 + 1e-9) for rate in priced.values())


@pytest.mark.parametrize("micro_batch", [None, 6])
def test_alternatives_of_a_batch_that_the_job_would_not_be_cut_into(micro_batch: int | None) -> None:
    """Half of a batch that was asked for, or of a job's equal part, need not be among those that a search looks at."""
    model, where, limits = make_model(6, 256, 512, stored="bf16"), make_device_machine(3 * MIB), Limits(micro_batch=micro_batch)
    outcome = solve(model, where, make_work(44, 64, 6), limits)
    assert isinstance(outcome, Optimal)
    told = explain(model, where, outcome.plan, limits=limits)
    priced = {alternative.change: alternative.tokens_per_s for alternative in told.alternatives}
    assert priced["half the micro-batch"], "it needs no more memory"
    if outcome.plan.gap == 0:
        assert all(rate is None or rate <= outcome.plan.predicted.tokens_per_s * (1 + 1e-9) for rate in priced.values())


def test_a_compute_bound_plan() -> None:
    _, told = explained(Limits(), disk_bytes_per_s=1e10, flops_per_s=1e8)
    assert told.prefill.binding == told.decode.binding == "host_compute"
    assert told.decode.idle_s < told.decode.seconds / 100


def test_what_does_not_fit_says_so() -> None:
    model, work = make_model(8, 256, 512), make_work(8, 200, 6)
    machine = make_machine(64 * MIB, base_bytes=4 * MIB)
    outcome = solve(model, machine, work, Limits())
    assert isinstance(outcome, Optimal)
    tight = machine.model_copy(
        update={"host": machine.host.model_copy(update={"memory_usable_bytes": outcome.plan.predicted.peak_bytes["host"] // 3})}
    )
    told = explain(model, tight, outcome.plan)
    assert any(alternative.tokens_per_s is None for alternative in told.alternatives)


def test_what_quantization_saves_and_costs() -> None:
    """A slow disk: int4 weights save reading in the ratio of their bytes; slower products are told as spent."""
    model = make_model(8, 256, 512, stored="bf16")
    machine = make_machine(
        64 * MIB, disk_bytes_per_s=1e7, base_bytes=4 * MIB, formats=("bf16", "int4-g64"), speeds={"int4-g64": 0.5}
    )
    work = make_work(8, 16, 6).model_copy(update={"quality": "int4"})
    limits = Limits(weights_memory_share=0.1)
    outcome = solve(model, machine, work, limits)
    assert isinstance(outcome, Optimal)
    assert outcome.plan.weights.format["mlp"] == outcome.plan.weights.format["attention"] == "int4-g64"
    told = explain(model, machine, outcome.plan, limits=limits)
    by_phase = {term.phase: term for term in told.quantization if term.what == "weights"}
    for phase, busy in (("prefill", told.prefill.busy_s), ("decode", told.decode.busy_s)):
        read = busy["disk_read"]
        saved = by_phase[phase].saved_s["disk_read"]
        assert 1.5 * read < saved <= (32 / 9 - 1) * read, "16 bits against 4.5, and larger reads are quicker"
        assert by_phase[phase].spent_s["host_compute"] > 0
    priced = {alternative.change: alternative.tokens_per_s for alternative in told.alternatives}
    assert priced["weights as stored"] is None, "a tenth of the weights' memory does not hold their buffers"
