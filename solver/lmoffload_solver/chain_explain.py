"""Reasons for a plan with a device: where time goes, what quantization saves and costs, what rejected alternatives would have given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from lmoffload_solver import core_split
from lmoffload_solver.chain_domain import ChainCandidate
from lmoffload_solver.chain_plan import decision_of
from lmoffload_solver.chain_predict import ChainSimulated, PhaseSeconds, costs_of, simulate_chain
from lmoffload_solver.chain_program import ChainProgram
from lmoffload_solver.chain_rounding import spread_kv
from lmoffload_solver.chain_search import ChainSearch
from lmoffload_solver.chain_solver import solve_program
from lmoffload_solver.costs import disk_of
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.device_memory import memory_of
from lmoffload_solver.explain import Alternative, CoreChoice, Explanation, PhaseTime, QuantizationTerm
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.host_cores import HostCores
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.runtime import own_runtime
from lmoffload_solver.value import Resource
from lmoffload_solver.workload import Limits


def explain_chain(model: ModelShape, machine: MachineProfile, plan: Plan, *, limits: Limits, file_system: str | None) -> Explanation:
    """Explain a plan of a machine with a device."""
    decision, job = decision_of(model, plan), Job(model, plan.workload)
    simulated = simulate_chain(job, costs_of(machine, decision, file_system), decision)
    search = ChainSearch(job, machine, disk_of(machine, file_system), limits, plan.quality, float("inf"))
    own = decision.runtime == own_runtime()
    solution = solve_program(ChainProgram(search.domain.choices(candidate_of(search, decision)))) if own else None
    parts = search.memory.parts(decision)["device"]
    away = [t for t in model.tensors if t.is_matrix and t.layer is not None and decision.homes[t.name] != "device"]
    moved = sum(decision.tensor_bytes(t) for t in away)
    return Explanation(
        prefill=_phase(simulated.prefill),
        decode=_phase(simulated.decode),
        predicted_tokens_per_s=plan.predicted.tokens_per_s,
        bound_tokens_per_s=plan.bound_tokens_per_s,
        gap=plan.gap,
        program_tokens_per_s=None if solution is None else job.tokens / solution.total_s,
        moved_bytes_per_step=moved,
        weights_bytes=plan.weights.bytes,
        kv_bytes=plan.kv.bytes,
        memory_parts=parts,
        memory_usable_bytes=search.memory.capacity["device"],
        alternatives=tuple(_alternatives(search, decision)),
        quantization=tuple(quantization(job, machine, decision, simulated, file_system)),
        cores=_cores(machine, search.disk, decision, simulated),
    )


def candidate_of(search: ChainSearch, decision: Decision) -> ChainCandidate:
    """The discrete choices of a decision, in the domain of a search; threads of another system's are the first assignment there."""
    assignments = search.domain.terms.assignments
    return ChainCandidate(
        decision.micro_batch,
        decision.num_micro_batches,
        tuple(decision.formats.items()),
        decision.kv_format,
        decision.hidden,
        (decision.prefill_products, decision.decode_products),
        decision.prefetch_depth,
        decision.host_attends,
        assignments.index(dict(decision.threads)) if decision.threads else 0,
        waves=decision.pipeline.waves,
    )


def quantization(
    job: Job, machine: MachineProfile, decision: Decision, simulated: ChainSimulated, file_system: str | None
) -> Iterator[QuantizationTerm]:
    """Of weights and of keys and values, per phase: busy seconds against the same placement in 16 bits, whether or not that would fit."""
    costs = costs_of(machine, decision, file_system)
    plain: list[tuple[Literal["weights", "kv"], str, Decision]] = []
    if any(fmt in QUANTIZED for fmt in decision.formats.values()):
        plain.append(("weights", ", ".join(sorted(set(decision.formats.values()))), replace(decision, formats={})))
    if decision.kv_format in QUANTIZED:
        plain.append(("kv", decision.kv_format, replace(decision, kv_format=memory_of(job, machine, Limits()).base_kv)))
    phases: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    for what, fmt, other in plain:
        without = simulate_chain(job, costs, other)
        for phase in phases:
            here: PhaseSeconds = getattr(simulated, phase)
            there: PhaseSeconds = getattr(without, phase)
            names = sorted({*here.busy, *there.busy})
            change = {name: there.busy.get(name, 0.0) - here.busy.get(name, 0.0) for name in names}
            saved: dict[Resource, float] = {name: gain for name, gain in change.items() if gain > 0}
            spent: dict[Resource, float] = {name: -gain for name, gain in change.items() if gain < 0}
            yield QuantizationTerm(what=what, format=fmt, phase=phase, saved_s=saved, spent_s=spent)


def _phase(phase: PhaseSeconds) -> PhaseTime:
    busy = {name: seconds for name, seconds in phase.busy.items() if seconds}
    if not busy:
        return PhaseTime(seconds=0.0, busy_s={"device": 0.0}, binding="device", idle_s=0.0)
    binding = max(busy, key=lambda name: busy[name])
    return PhaseTime(seconds=phase.seconds, busy_s=busy, binding=binding, idle_s=max(0.0, phase.seconds - busy[binding]))


def _alternatives(search: ChainSearch, decision: Decision) -> Iterator[Alternative]:
    """Other choices, their weights placed anew where that is part of the change."""
    own = replace(decision, runtime=own_runtime())
    candidate = candidate_of(search, decision)
    if decision.runtime != own_runtime():
        yield _simulated(search, "the same policy, run by lmoffload", own)
    if candidate.formats or candidate.kv_format in QUANTIZED:
        stored = next(way for way in search.domain.variants.ways() if not way.formats)
        plain = replace(candidate, formats=(), kv_format=search.domain.base_format, products=stored.products)
        yield _solved(search, "weights as stored, KV unquantized" if search.domain.terms.shares_cores else "16-bit weights and KV", plain)
    if candidate.micro_batch > 1:
        yield _solved(search, "half the micro-batch", replace(candidate, micro_batch=candidate.micro_batch // 2))
    if candidate.num_micro_batches > 1:
        yield _solved(search, "one micro-batch", replace(candidate, num_micro_batches=1))
    layers, batches = search.model.num_layers, decision.num_micro_batches
    yield _simulated(search, "KV on the host, attended to on the device", replace(own, kv=spread_kv(layers, batches, 0, 0, 0)))
    yield _simulated(search, "KV on the host, attended to by the CPU", replace(own, kv=spread_kv(layers, batches, 0, 0, batches)))
    device = KVUnit("device", "device")
    resident = replace(own, kv=((device,) * batches,) * layers, homes=dict.fromkeys(own.homes, "device"), hidden="device")
    yield _simulated(search, "no offload", resident)
    if candidate.prefetch_depth:
        yield _simulated(search, "no prefetch", replace(own, prefetch_depth=0))


def _simulated(search: ChainSearch, change: str, decision: Decision) -> Alternative:
    peak = search.memory.peaks(decision)["device"]
    if not search.memory.fits(decision):
        return Alternative(change=change, tokens_per_s=None, peak_bytes=peak)
    seconds = simulate_chain(search.job, costs_of(search.machine, decision, search.disk.file_system), decision).total_s
    return Alternative(change=change, tokens_per_s=search.job.tokens / seconds, peak_bytes=peak)


def _solved(search: ChainSearch, change: str, candidate: ChainCandidate) -> Alternative:
    """The best placement of other discrete choices, in a domain of their batch alone: the job's may not have it."""
    batch = {"micro_batch": candidate.micro_batch, "num_micro_batches": candidate.num_micro_batches}
    limits = search.domain.limits.model_copy(update=batch)
    search = ChainSearch(search.job, search.machine, search.disk, limits, search.domain.quality, search.deadline)
    program = ChainProgram(search.domain.choices(candidate))
    solution = solve_program(program)
    if solution is None:
        return Alternative(change=change, tokens_per_s=None, peak_bytes=None)
    tried = [_simulated(search, change, decision) for _, decision in search.rounded(candidate, program, solution)]
    return max(tried, key=lambda found: found.tokens_per_s or 0.0, default=Alternative(change=change, tokens_per_s=None, peak_bytes=None))


def _cores(machine: MachineProfile, disk: Disk, decision: Decision, simulated: ChainSimulated) -> CoreChoice:
    graph = core_split.attention_graph(decision.num_micro_batches)
    cores = HostCores.of(machine, disk, decision.most_threads)
    work = core_split.work_of(machine, disk, decision, simulated)
    return CoreChoice(
        cores=cores.cores,
        levels=len(core_split.levels_of(graph)),
        widest_level=core_split.widest_level(graph),
        best=core_split.split_of(machine, disk, decision, simulated),
        default=core_split.default_split(work, core_split.speedups_of(cores), cores.cores),
    )
