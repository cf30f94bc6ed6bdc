"""Plans for an emulated device: a machine made of another's curves, prices by them, memory, policies."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.chain_layout import lay_out
from lmoffload_solver.chain_plan import decision_of, plan_of
from lmoffload_solver.chain_predict import costs_of, simulate_chain
from lmoffload_solver.chain_program import ChainProgram
from lmoffload_solver.chain_schedule import Clock
from lmoffload_solver.chain_search import ChainSearch
from lmoffload_solver.chain_slowing import factors
from lmoffload_solver.chain_solver import scaling_s, solve_program
from lmoffload_solver.chain_work import ChainWork
from lmoffload_solver.costs import Contention, DiskCosts, LayerKind, MachineCosts
from lmoffload_solver.decision import Job, KVUnit
from lmoffload_solver.device_memory import memory_of
from lmoffload_solver.emulated import bare, copy_rate, emulated
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import Contention as Measured
from lmoffload_solver.machine import MachineProfile, MemoryRate
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import Infeasible, plan_in
from lmoffload_solver.plan import Plan
from lmoffload_solver.policies.price import Policy, price_policy
from lmoffload_solver.search import solve
from lmoffload_solver.soundness import check_plan
from lmoffload_solver.workload import Limits
from tests.solver.toys import MIB, make_machine, make_model, make_work

DEVICE = EmulatedDevice(memory_bytes=6 * MIB, bytes_per_s=1e8)


def machine_of(**changes: object) -> MachineProfile:
    base = make_machine(512 * MIB, cores=2, base_bytes=MIB)
    copies = (MemoryRate(tier="host", threads=1, bytes_per_s=4e8, spread=0.0),)
    return base.model_copy(update={"copies": copies, **changes})


def model_of() -> ModelShape:
    return make_model(6, 256, 512, stored="bf16")


@cache
def planned(device: EmulatedDevice = DEVICE) -> tuple[ModelShape, MachineProfile, Plan]:
    model, machine = model_of(), emulated(machine_of(), device)
    given = Limits(emulated_device=device, solve_s=60.0)
    plan = plan_in(solve(model, machine, make_work(8, 64, 4), given))  # type: ignore[arg-type]
    assert plan is not None
    return model, machine, plan


def test_a_machine_with_an_emulated_device_gives_it_memory_and_a_link() -> None:
    machine = emulated(machine_of(), DEVICE)
    assert machine.accelerator == DEVICE
    assert machine.host.memory_usable_bytes == (512 - 6) * MIB
    rates = {link.direction: max(link.bytes_per_s.y) for link in machine.links}
    assert rates["upload"] == rates["download"] == pytest.approx(1e8)
    assert MachineProfile.model_validate_json(machine.model_dump_json()) == machine


def test_a_link_is_no_faster_than_copies() -> None:
    machine = emulated(machine_of(), EmulatedDevice(memory_bytes=MIB, bytes_per_s=1e12))
    assert max(machine.links[0].bytes_per_s.y) == pytest.approx(4e8)
    read = (MemoryRate(tier="host", threads=1, bytes_per_s=9e8, spread=0.0),)
    assert copy_rate(machine_of(copies=(), memory=read)) == pytest.approx(3e8)
    with pytest.raises(StatedError, match="lacks rates of memory"):
        copy_rate(machine_of(copies=()))


def test_a_device_that_leaves_no_memory_is_refused() -> None:
    with pytest.raises(StatedError, match="emulate a smaller one"):
        emulated(machine_of(), EmulatedDevice(memory_bytes=512 * MIB, bytes_per_s=1e9))
    with pytest.raises(StatedError, match="has a device"):
        emulated(emulated(machine_of(), DEVICE), DEVICE)


def test_the_machine_below_is_had_back() -> None:
    machine, limits = bare(emulated(machine_of(), DEVICE), Limits(emulated_device=DEVICE, host_memory_bytes=MIB))
    assert (machine.accelerator, machine.links) == (None, ())
    assert machine.host == machine_of().host
    assert (limits.emulated_device, limits.host_memory_bytes) == (None, 7 * MIB)


def test_copies_held_to_a_rate_slow_products_as_measured_between_rates() -> None:
    entries = tuple(
        Measured(first="copy", second="host_compute", first_slowdown=1.0, second_slowdown=slow, first_per_s=rate)
        for rate, slow in ((1e7, 1.0), (1e8, 1.2), (1e9, 1.8))
    )
    for rate, slow in ((1e7, 1.0), (1e8, 1.2), (10**8.3, 1.2 + 0.3 * 0.6)):
        machine = emulated(machine_of(contention=entries), EmulatedDevice(memory_bytes=MIB, bytes_per_s=rate))
        assert Contention.of(machine, "upload", "device").compute == pytest.approx(slow)


def test_a_layer_on_the_device_takes_what_it_takes_on_the_host() -> None:
    model, machine, plan = planned()
    decision = decision_of(model, plan)
    job, costs = Job(model, plan.workload), costs_of(machine, decision)
    block = next(job.blocks(plan.micro_batch, plan.num_micro_batches))
    host = MachineCosts(machine, DiskCosts(machine.disks[0], 1), plan.threads["compute"])
    rows = float(plan.micro_batch)
    layer = float(host.layer_seconds(LayerKind.of(model, 0), plan.kernels.decode, np.array([rows]))[0])
    attention = plan.micro_batch * float(host.decode_attention_seconds(model.layers[0], [65])[0])
    device_only = replace(decision, kv=((KVUnit("device", "device"),) * plan.num_micro_batches,) * model.num_layers)
    unit = ChainWork(job, costs, device_only).step(block, 1)[1]
    assert unit.batches[0].compute == pytest.approx(layer + attention)


def test_a_plan_and_its_decision_are_the_same_thing() -> None:
    model, machine, plan = planned()
    assert plan.kernels.decode in {curve.kernel for curve in machine.linear}
    assert plan.kv.format.key == "fp32"
    check_plan(model, plan)
    decision, job = decision_of(model, plan), Job(model, plan.workload)
    again = plan_of(job, machine, decision, digest=plan.model.digest, limits=plan.limits)
    assert again.predicted == plan.predicted
    assert simulate_chain(job, costs_of(machine, decision), decision).total_s == pytest.approx(plan.predicted.total_s)


def test_everything_fits_and_more_memory_is_never_slower() -> None:
    seconds = []
    for mib in (6, 8, 24):
        model, machine, plan = planned(EmulatedDevice(memory_bytes=mib * MIB, bytes_per_s=1e8))
        assert plan.predicted.peak_bytes["device"] <= mib * MIB
        assert memory_of(Job(model, plan.workload), machine, plan.limits).fits(decision_of(model, plan))
        seconds.append(plan.predicted.total_s)
    assert all(after <= before * 1.005 for before, after in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_the_program_is_no_slower_than_what_is_simulated() -> None:
    model, machine = model_of(), emulated(machine_of(), DEVICE)
    for prompts, length in ((3, 16), (6, 128)):
        search = ChainSearch(Job(model, make_work(prompts, length, 4)), machine, machine.disks[0], Limits(), "exact", float("inf"))
        found = search.run()
        assert found is not None
        solution = solve_program(ChainProgram(search.domain.choices(found.candidate)))
        assert solution is not None
        assert search.domain.least_s(found.candidate) <= solution.total_s * (1 + 1e-6)
        assert solution.total_s <= found.simulated.total_s * (1 + 1e-6)


def test_threads_beyond_the_cores_slow_device_and_host() -> None:
    model, machine = model_of(), emulated(machine_of(), DEVICE)
    _, _, plan = planned()
    decision = decision_of(model, plan)
    crowded = costs_of(machine, replace(decision, threads={"compute": 2, "host_attention": 2, "disk_io": 1, "staging": 1}))
    assert crowded.contention["device", "host_attention"] == Contention(2.0, 2.0)
    both = factors({"device": 1.0, "host_attention": 1.0}, crowded.contention, lambda resource: resource)  # type: ignore[misc]
    assert both == {"device": pytest.approx(2.0), "host_attention": pytest.approx(2.0)}


def test_a_device_that_waited_begins_slowly() -> None:
    model, _, plan = planned()
    decision, job = decision_of(model, plan), Job(model, plan.workload)
    overheads = machine_of().overheads.model_copy(update={"waking": ((0.01, 0.002), (0.1, 0.02))})
    costs = costs_of(emulated(machine_of(overheads=overheads), DEVICE), decision)
    assert costs.waking is not None
    assert [costs.waking(idle) for idle in (0.0, 0.01, 0.055, 5.0)] == pytest.approx([0.0, 0.002, 0.011, 0.02])
    steps = ChainWork(job, costs, decision).block(next(job.blocks(plan.micro_batch, plan.num_micro_batches)))
    ends = [lay_out(steps, decision.runtime, 0, Clock(waking).emit)[-1] for waking in (None, costs.waking)]
    assert ends[0] < ends[1]


@pytest.mark.parametrize("change", ["upload", "disk_read"])
def test_prices_of_links_and_disk_count_what_they_cost_others(change: str) -> None:
    """A copy and a read that slow products down: the program's dual against a program with a rate a little higher."""
    slow = (
        Measured(first="copy", second="host_compute", first_slowdown=1.3, second_slowdown=1.6, first_per_s=1e8),
        Measured(first="disk_read", second="host_compute", first_slowdown=1.5, second_slowdown=1.5),
    )
    rate = 1e8 if change == "upload" else 3e8
    machine = emulated(machine_of(contention=slow), EmulatedDevice(memory_bytes=6 * MIB, bytes_per_s=rate))
    link, disk = machine.links[0].bytes_per_s, machine.disks[0]
    quick = 1.0001
    if change == "upload":
        curve = link.model_copy(update={"y": tuple(quick * y for y in link.y)})
        other = machine.model_copy(update={"links": tuple(one.model_copy(update={"bytes_per_s": curve}) for one in machine.links)})
    else:
        read = tuple(
            one.model_copy(update={"bytes_per_s": one.bytes_per_s.model_copy(update={"y": tuple(quick * y for y in one.bytes_per_s.y)})})
            for one in disk.read
        )
        other = machine.model_copy(update={"disks": (disk.model_copy(update={"read": read}),)})
    job, limits = Job(model_of(), make_work(8, 64, 4)), Limits(micro_batch=2, num_micro_batches=2)
    if change == "disk_read":
        limits = limits.model_copy(update={"weights_memory_bytes": 5 * MIB})
    searches = [ChainSearch(job, one, one.disks[0], limits, "exact", float("inf")) for one in (machine, other)]
    found = searches[0].run()
    assert found is not None
    candidate = replace(found.candidate, prefetch_depth=1)
    programs = [ChainProgram(search.domain.choices(candidate)) for search in searches]
    slower, quicker = (solve_program(program) for program in programs)
    assert slower is not None and quicker is not None
    gain = slower.total_s - quicker.total_s
    assert gain > 1e-6 * slower.total_s, "the resource binds"
    assert scaling_s(programs[0], slower, change) * (1 - 1 / quick) == pytest.approx(gain, rel=0.01)


def test_what_a_device_too_small_needs_is_told_as_it_is_given() -> None:
    small = EmulatedDevice(memory_bytes=MIB // 2, bytes_per_s=2.5e8)
    outcome = solve(model_of(), emulated(machine_of(), small), make_work(8, 64, 4), Limits(emulated_device=small))  # type: ignore[arg-type]
    assert isinstance(outcome, Infeasible) and "--emulate-device" in outcome.what_would_help and "MiB@250MB/s" in outcome.what_would_help
    larger = emulated_device_in(outcome.what_would_help)
    again = solve(model_of(), emulated(machine_of(), larger), make_work(8, 64, 4), Limits(emulated_device=larger))  # type: ignore[arg-type]
    assert plan_in(again) is not None


def emulated_device_in(advice: str) -> EmulatedDevice:
    size = int(advice.partition("--emulate-device ")[2].partition("MiB@")[0])
    return EmulatedDevice(memory_bytes=size * MIB, bytes_per_s=2.5e8)


@pytest.mark.parametrize("policy", ["accelerate", "zero-inference", "flexgen"])
def test_policies_are_plans_that_run_and_are_no_better_than_the_own(policy: Policy) -> None:
    model, machine, own = planned()
    limits = Limits(emulated_device=DEVICE)
    plan = price_policy(policy, model, machine, own.workload, limits)
    check_plan(model, plan)
    assert plan.policy == policy
    assert plan.runtime is not None and plan.runtime.overlap == ("none" if policy == "accelerate" else "barriers")
    assert plan.kv.format.key == "fp32"
    assert {t.format for t in plan.weights.tensors.values()} == {t.format for t in model.tensors}
    assert plan.predicted.peak_bytes["device"] <= DEVICE.memory_bytes
    assert plan.predicted.total_s >= own.predicted.total_s
    if policy == "zero-inference":
        assert {plan.weights.tensors[t.name].tier for t in model.tensors if t.is_matrix} <= {"host", "disk"}


def test_a_plan_that_keeps_what_the_host_attends_to_on_the_device_is_refused() -> None:
    model, _, plan = planned()
    homes = tuple((layer, batch, "device") for layer, batch, _ in plan.kv.homes)
    wrong = plan.model_copy(
        update={"kv": plan.kv.model_copy(update={"homes": homes}), "attention": plan.attention.model_copy(update={"host": ((0, 0),)})}
    )
    with pytest.raises(StatedError, match="host attend to layer 0"):
        check_plan(model, wrong)
