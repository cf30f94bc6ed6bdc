"""Where a plan's time and memory go, what binds, how near to the bound it is, and what some other choices would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from lmoffload_solver import counting, memory
from lmoffload_solver.assemble import peak_bytes
from lmoffload_solver.blocks import Step, decode_steps
from lmoffload_solver.candidate import Candidate
from lmoffload_solver.core_split import CoreSplit, layer_graph, levels_of, widest_level
from lmoffload_solver.costs import COMPUTE_RESOURCE, PHASES, READ_RESOURCE, disk_of
from lmoffload_solver.evaluate import Evaluator
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import KVFormat, Plan
from lmoffload_solver.prices import Prices
from lmoffload_solver.program import Program
from lmoffload_solver.rounding import Stream
from lmoffload_solver.simulate import step_ends
from lmoffload_solver.timeline import PlanCosts, block_timeline, job_busy
from lmoffload_solver.value import Resource, Tier, Value
from lmoffload_solver.variants import Variant
from lmoffload_solver.workload import Limits


class PhaseTime(Value):
    """One phase of the first block."""

    seconds: float
    busy_s: dict[Resource, float]
    """Seconds that each resource works."""
    binding: Resource
    """The resource that works longest."""
    idle_s: float
    """Seconds in which the binding resource waits: what perfect overlap would save."""


class Alternative(Value):
    """Another choice, priced in the same way, its weights placed anew."""

    change: str
    tokens_per_s: float | None
    """None where it does not fit."""
    peak_bytes: int | None


class QuantizationTerm(Value):
    """What keeping something in fewer bits saves and costs in a phase of the whole job, in busy seconds of resources."""

    what: Literal["weights", "kv"]
    format: str
    phase: Literal["prefill", "decode"]
    saved_s: dict[Resource, float]
    spent_s: dict[Resource, float]


class CoreChoice(Value):
    """The host's cores as shared by the plan, beside what the libraries' defaults would give."""

    cores: int
    levels: int
    """Topological levels of the compute task's operator graph."""
    widest_level: int
    """Operators that can run at once."""
    best: CoreSplit
    default: CoreSplit


class Explanation(Value):
    """Everything `lmoffload explain` shows."""

    schema_version: Literal[1] = 1
    prefill: PhaseTime
    decode: PhaseTime
    """All decode steps of the first block."""
    predicted_tokens_per_s: float
    bound_tokens_per_s: float
    gap: float
    program_tokens_per_s: float | None
    """The linear program's value for the plan's own choices: what whole tensors and imperfect overlap cost is the difference."""
    moved_bytes_per_step: int
    weights_bytes: dict[Tier, int]
    kv_bytes: dict[Tier, int]
    memory_parts: dict[str, int]
    """The named parts of the peak in the compute tier."""
    memory_usable_bytes: int
    alternatives: tuple[Alternative, ...]
    quantization: tuple[QuantizationTerm, ...] = ()
    cores: CoreChoice


def explain(
    model: ModelShape, machine: MachineProfile, plan: Plan, *, limits: Limits | None = None, file_system: str | None = None
) -> Explanation:
    """Explain a plan for a machine.

    Args:
        limits: those the plan was made under; what they fix is left free in the alternatives.

    Raises:
        StatedError: the profile lacks a disk or a curve that the plan needs.
    """
    limits = limits or Limits()
    if machine.accelerator is not None:
        from lmoffload_solver.chain_explain import explain_chain

        return explain_chain(model, machine, plan, limits=limits, file_system=file_system)
    steps = (Step(0, 1.0), *decode_steps(plan.workload.gen_len))
    costs = PlanCosts(model, machine, plan, file_system=file_system, steps=steps)
    prices = Prices(model, machine, disk_of(machine, file_system), plan.workload, limits)
    candidate = candidate_of(model, plan)
    evaluator = Evaluator(prices, candidate.variant)
    solution = Program(evaluator.program_choices(candidate)).solve()
    tokens = plan.workload.num_prompts * plan.workload.gen_len
    prefill, decode = _phases(evaluator, costs)
    return Explanation(
        prefill=prefill,
        decode=decode,
        predicted_tokens_per_s=plan.predicted.tokens_per_s,
        bound_tokens_per_s=plan.bound_tokens_per_s,
        gap=plan.gap,
        program_tokens_per_s=None if solution is None else tokens / solution.total_s,
        moved_bytes_per_step=counting.moved_bytes(costs.units),
        weights_bytes=plan.weights.bytes,
        kv_bytes=plan.kv.bytes,
        memory_parts=memory.breakdown(model, plan),
        memory_usable_bytes=evaluator.capacity.memory_bytes,
        alternatives=tuple(_priced(prices, what, other, tokens) for what, other in _others(candidate, plan.workload.num_prompts)),
        quantization=tuple(_terms(model, machine, plan, file_system)),
        cores=_cores(machine, plan, evaluator),
    )


def _cores(machine: MachineProfile, plan: Plan, evaluator: Evaluator) -> CoreChoice:
    """The plan's threads beside what the libraries would do: all cores for every operator, waiting busily, which was measured."""
    graph = layer_graph()
    resources = plan.predicted.resources
    compute = resources.get(COMPUTE_RESOURCE[evaluator.tiers[0]], 0.0)
    all_cores = max(evaluator.prices.linear_threads)
    as_many = candidate_of(evaluator.prices.model, plan)
    default = replace(as_many, threads=all_cores)
    seconds = [float(sums.compute @ sums.weight) for sums, _ in (evaluator.sums(as_many), evaluator.sums(default))]
    slowed = compute * seconds[1] / seconds[0] * (machine.default_threads_slowdown or 1.0)
    return CoreChoice(
        cores=machine.host.cores,
        levels=len(levels_of(graph)),
        widest_level=widest_level(graph),
        best=CoreSplit(streams=1, threads=dict(plan.threads), slowest_s=max(resources.values(), default=0.0)),
        default=CoreSplit(streams=1, threads={"compute": machine.host.cores, "disk_io": machine.host.cores}, slowest_s=slowed),
    )


def candidate_of(model: ModelShape, plan: Plan) -> Candidate:
    """The discrete choices of a plan."""
    changed = ((name, fmt) for name, fmt in plan.weights.format.items() if fmt != counting.main_format(model, name))
    return Candidate(
        plan.micro_batch,
        plan.num_micro_batches,
        plan.threads["compute"],
        plan.kernels.prefill,
        plan.kernels.decode,
        plan.prefetch_depth,
        plan.stream,
        Variant(tuple(changed), plan.kv.format.key),
        plan.prefill_chunk,
        len({layer for layer, _, tier in plan.kv.homes if tier == "disk"}),
    )


def _others(candidate: Candidate, num_prompts: int) -> Iterator[tuple[str, Candidate]]:
    """Choices worth seeing beside the plan's."""
    variant = candidate.variant
    if variant.formats:
        yield "weights as stored", replace(candidate, variant=replace(variant, formats=()))
    if variant.kv_format != "fp32":
        yield "keys and values in fp32", replace(candidate, variant=replace(variant, kv_format="fp32"))
    if candidate.kv_on_disk:
        yield "keys and values in memory", replace(candidate, kv_on_disk=0)
    if candidate.prefill_chunk is not None:
        yield "prompts whole", replace(candidate, prefill_chunk=None)
    if candidate.micro_batch > 1:
        yield "half the micro-batch", replace(candidate, micro_batch=candidate.micro_batch // 2)
    if candidate.num_micro_batches > 1:
        yield "one micro-batch", replace(candidate, num_micro_batches=1)
    if candidate.block_rows < num_prompts:
        yield "twice the micro-batches", replace(candidate, num_micro_batches=2 * candidate.num_micro_batches)
    if candidate.prefetch_depth:
        yield "no reading ahead", replace(candidate, prefetch_depth=0)
    other: Stream = "matrix" if candidate.stream == "layer" else "layer"
    if not candidate.kv_on_disk:
        yield f"streamed by {other}", replace(candidate, stream=other)
    yield "read one further ahead", replace(candidate, prefetch_depth=candidate.prefetch_depth + 1)


def _priced(prices: Prices, change: str, candidate: Candidate, tokens: int) -> Alternative:
    """The best placement of other choices."""
    evaluator = Evaluator(prices, candidate.variant)
    priced = [(evaluator.simulate(candidate, placement).total_s, placement) for placement in evaluator.placements(candidate)]
    if not priced:
        return Alternative(change=change, tokens_per_s=None, peak_bytes=None)
    seconds, placement = min(priced, key=lambda pair: pair[0])
    return Alternative(change=change, tokens_per_s=tokens / seconds, peak_bytes=peak_bytes(evaluator, candidate, placement))


def _terms(model: ModelShape, machine: MachineProfile, plan: Plan, file_system: str | None) -> Iterator[QuantizationTerm]:
    """What quantized weights, and quantized keys and values, save and cost: the busy seconds of the same plan with each as it would be
    stored, less those of the plan."""
    stored = {t.name: plan.weights.tensors[t.name].model_copy(update={"format": t.format}) for t in model.tensors}
    changed = sorted({kept.format for name, kept in plan.weights.tensors.items() if kept.format != stored[name].format})
    without: list[tuple[Literal["weights", "kv"], str, Plan]] = []
    if changed:
        weights = plan.weights.model_copy(update={"tensors": stored})
        without.append(("weights", "+".join(changed), plan.model_copy(update={"weights": weights})))
    if plan.kv.format.key != "fp32":
        exact = KVFormat(key="fp32", value="fp32")
        without.append(("kv", plan.kv.format.key, plan.model_copy(update={"kv": plan.kv.model_copy(update={"format": exact})})))
    steps = (Step(0, 1.0), *decode_steps(plan.workload.gen_len))
    busy = job_busy(PlanCosts(model, machine, plan, file_system=file_system, steps=steps))
    for what, name, other in without:
        instead = job_busy(PlanCosts(model, machine, other, file_system=file_system, steps=steps))
        for phase in PHASES:
            gain: dict[Resource, float] = {resource: instead[phase].get(resource, 0.0) - spent for resource, spent in busy[phase].items()}
            yield QuantizationTerm(
                what=what,
                format=name,
                phase=phase,
                saved_s={resource: seconds for resource, seconds in gain.items() if seconds > 0},
                spent_s={resource: -seconds for resource, seconds in gain.items() if seconds < 0},
            )


def _phases(evaluator: Evaluator, costs: PlanCosts) -> tuple[PhaseTime, PhaseTime]:
    """Prefill and decode of the first block, sampled steps weighted with what they stand for."""
    near, far = evaluator.tiers[0], evaluator.tiers[1]
    timeline = block_timeline(costs)
    names = dict.fromkeys((READ_RESOURCE[far], COMPUTE_RESOURCE[near], *sorted({timed.task.resource for timed in timeline})))
    ends = [0.0, *step_ends(timeline)]
    seconds = [0.0, 0.0]
    busy: list[dict[Resource, float]] = [dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)]
    for number, step in enumerate(costs.steps):
        seconds[step.step > 0] += step.weight * (ends[number + 1] - ends[number])
    for timed in timeline:
        step = costs.steps[timed.task.step]
        busy[step.step > 0][timed.task.resource] += step.weight * (timed.end_s - timed.begin_s)
    return _phase(seconds[0], busy[0]), _phase(seconds[1], busy[1])


def _phase(seconds: float, known: dict[Resource, float]) -> PhaseTime:
    binding = max(known, key=lambda name: known[name])
    return PhaseTime(seconds=seconds, busy_s=known, binding=binding, idle_s=max(0.0, seconds - known[binding]))
