"""Plans of machines with a device: from a decision, and back."""

from __future__ import annotations

from dataclasses import dataclass

from lmoffload_solver import counting
from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.chain_predict import ChainSimulated, costs_of, simulate_chain
from lmoffload_solver.chain_variants import PRODUCTS
from lmoffload_solver.core_split import split_of
from lmoffload_solver.costs import disk_of
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.device_memory import ChainMemory, memory_of
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.host_cores import HostCores
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.memory import spilled_of
from lmoffload_solver.model import ModelShape
from lmoffload_solver.pipeline import Pipeline
from lmoffload_solver.plan import (
    AttentionPlace,
    HiddenPlan,
    KernelsPlan,
    KVFormat,
    KVPlan,
    LooserQuality,
    Named,
    Plan,
    PolicyFigures,
    Predicted,
    ShadowPrice,
    TensorPlan,
    WeightsPlan,
)
from lmoffload_solver.runtime import own_runtime
from lmoffload_solver.value import Resource, Tier
from lmoffload_solver.workload import Limits

PLAIN = "16bit"
"""Products over 16-bit weights, where nothing is quantized."""

TIERS: tuple[Tier, ...] = ("device", "host", "disk")


@dataclass(frozen=True)
class Remarks:
    """What a plan says beside its decisions."""

    policy: str = "optimal"
    predicted_by_policy: PolicyFigures | None = None
    bound_s: float | None = None
    """Seconds that nothing of the domain goes below; None: those of the plan."""
    cut_short: bool = False
    solve_s: float = 0.0
    programs_solved: int = 0
    shadow_prices: tuple[ShadowPrice, ...] = ()
    looser_quality: tuple[LooserQuality, ...] = ()
    sentences: tuple[str, ...] = ()


def plan_of(
    job: Job,
    machine: MachineProfile,
    decision: Decision,
    *,
    digest: str,
    limits: Limits | None = None,
    simulated: ChainSimulated | None = None,
    remarks: Remarks | None = None,
    file_system: str | None = None,
) -> Plan:
    """The plan of a decision, with what is predicted for it; simulated here unless it was before."""
    remarks, limits = remarks or Remarks(), limits or Limits()
    simulated = simulated or simulate_chain(job, costs_of(machine, decision, file_system), decision)
    memory = memory_of(job, machine, limits)
    predicted = _predicted(job, machine, memory, decision, simulated)
    bound = max(predicted.tokens_per_s, job.tokens / (remarks.bound_s or simulated.total_s))
    attended = tuple((layer, batch) for layer, units in enumerate(decision.kv) for batch, unit in enumerate(units) if unit.host_attends)
    plan = Plan(
        model=Named(name=job.model.name, digest=digest),
        machine=Named(name=machine.name, digest=machine.fingerprint()),
        workload=job.workload,
        limits=limits,
        quality=job.workload.quality,
        goal=job.workload.goal,
        policy=remarks.policy,
        predicted_by_policy=remarks.predicted_by_policy,
        status="time_limit" if remarks.cut_short else "optimal",
        bound_tokens_per_s=bound,
        gap=(bound - predicted.tokens_per_s) / bound,
        micro_batch=decision.micro_batch,
        num_micro_batches=decision.num_micro_batches,
        attention=AttentionPlace(
            prefill="device",
            decode="host" if attended else "device",
            host_share=len(attended) / (job.model.num_layers * decision.num_micro_batches),
            host=attended,
            streams=_streams(machine, decision, file_system) if attended else 1,
        ),
        weights=_weights(job.model, decision),
        kv=_kv(job, memory, decision),
        hidden=HiddenPlan(tier=decision.hidden),
        kernels=_kernels(decision),
        threads=dict(decision.threads) or split_of(machine, disk_of(machine, file_system), decision, simulated).totals(),
        prefetch_depth=decision.prefetch_depth,
        layers_per_device=decision.pipeline.layers,
        waves=decision.pipeline.waves,
        runtime=None if decision.runtime == own_runtime() else decision.runtime,
        predicted=predicted,
        binding=max(predicted.resources, key=lambda name: predicted.resources[name]),
        shadow_prices=remarks.shadow_prices,
        looser_quality=remarks.looser_quality,
        solve_s=remarks.solve_s,
        programs_solved=remarks.programs_solved,
        remarks=(*machine.remarks, *remarks.sentences),
    )
    return plan if limits.emulated_device is None else _with_spilled(job.model, plan)


def _streams(machine: MachineProfile, decision: Decision, file_system: str | None) -> int:
    """Of the host's attention, as it is priced: those that make most of its threads; one beside an emulated device."""
    if not decision.threads or isinstance(machine.accelerator, EmulatedDevice):
        return 1
    cores = HostCores.of(machine, disk_of(machine, file_system), decision.most_threads)
    return cores.streams(decision.threads["host_attention"], decision.num_micro_batches)[0]


def _with_spilled(model: ModelShape, plan: Plan) -> Plan:
    """With the bytes of keys and values on the disk as they will lie there: in whole pages, of each prompt's own length."""
    on_disk = sum(spilled.num_bytes for spilled in spilled_of(model, plan).values())
    peaks = plan.predicted.peak_bytes
    predicted = plan.predicted.model_copy(update={"peak_bytes": {**peaks, "disk": peaks["disk"] + on_disk - plan.kv.bytes["disk"]}})
    kv = plan.kv.model_copy(update={"bytes": {**plan.kv.bytes, "disk": on_disk}})
    return plan.model_copy(update={"kv": kv, "predicted": predicted})


def decision_of(model: ModelShape, plan: Plan) -> Decision:
    """The decision that a plan was made of."""
    matrices = [t for t in model.tensors if t.is_matrix]
    formats = {}
    for tensor in matrices:
        chosen = plan.weights.tensors[tensor.name].format
        if chosen != tensor.format:
            formats[tensor.tensor_class] = chosen
    homes: list[list[Tier]] = [["device"] * plan.num_micro_batches for _ in range(model.num_layers)]
    for layer, batch, tier in plan.kv.homes:
        homes[layer][batch] = tier
    attended = set(plan.attention.host)
    kv = tuple(
        tuple(KVUnit(tier, "host" if (layer, place) in attended else "device") for place, tier in enumerate(tiers))
        for layer, tiers in enumerate(homes)
    )
    return Decision(
        micro_batch=plan.micro_batch,
        num_micro_batches=plan.num_micro_batches,
        formats=formats,
        homes={t.name: plan.weights.tensors[t.name].tier for t in matrices},
        kv_format=plan.kv.format.key,
        kv=kv,
        hidden=plan.hidden.tier,
        prefetch_depth=plan.prefetch_depth,
        runtime=plan.runtime or own_runtime(),
        prefill_products=PRODUCTS[0] if plan.kernels.prefill == PLAIN else plan.kernels.prefill,
        decode_products=PRODUCTS[0] if plan.kernels.decode == PLAIN else plan.kernels.decode,
        threads=plan.threads if plan.runtime is None or plan.limits.emulated_device is not None else {},
        most_threads=plan.limits.threads,
        pipeline=Pipeline(plan.layers_per_device, plan.waves),
    )


def _weights(model: ModelShape, decision: Decision) -> WeightsPlan:
    tensors: dict[str, TensorPlan] = {}
    by_tier: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for tensor in model.tensors:
        tier: Tier = decision.homes[tensor.name] if tensor.is_matrix else "device"
        tensors[tensor.name] = TensorPlan(format=decision.format_of(tensor), tier=tier)
        by_tier[tier] += decision.tensor_bytes(tensor)
    classes = dict.fromkeys(tensor.tensor_class for tensor in model.tensors)
    formats = {c: decision.formats.get(c) or counting.main_format(model, c) for c in classes}
    return WeightsPlan(format=formats, bytes=by_tier, tensors=tensors)


def _kv(job: Job, memory: ChainMemory, decision: Decision) -> KVPlan:
    stages = [memory.stage_beside_weights(decision, stage) for stage in range(decision.pipeline.num_stages)]
    homes = tuple((layer, batch, unit.home) for layer, units in enumerate(decision.kv) for batch, unit in enumerate(units))
    sizes = {tier: sum(parts[tier]["kv"] for parts in stages) for tier in TIERS}
    return KVPlan(format=KVFormat(key=decision.kv_format, value=decision.kv_format), bytes=sizes, homes=homes)


def _kernels(decision: Decision) -> KernelsPlan:
    """Of each phase: products over 16-bit weights, over widened ones, or dequantizing in the inner loop; or the kernels' own names."""
    if decision.prefill_products in PRODUCTS and not any(fmt in QUANTIZED for fmt in decision.formats.values()):
        return KernelsPlan(prefill=PLAIN, decode=PLAIN)
    return KernelsPlan(prefill=decision.prefill_products, decode=decision.decode_products)


def _predicted(job: Job, machine: MachineProfile, memory: ChainMemory, decision: Decision, simulated: ChainSimulated) -> Predicted:
    busy: dict[Resource, float] = {}
    for phase in (simulated.prefill, simulated.decode):
        for resource, seconds in phase.busy.items():
            busy[resource] = busy.get(resource, 0.0) + seconds
    later = job.tokens - job.num_prompts
    return Predicted(
        prefill_s=simulated.prefill.seconds,
        decode_s=simulated.decode.seconds,
        total_s=simulated.total_s,
        tokens_per_s=job.tokens / simulated.total_s,
        decode_tokens_per_s=later / simulated.decode.seconds if simulated.decode.seconds else 0.0,
        step_s=simulated.step_s,
        resources={name: seconds for name, seconds in busy.items() if seconds},
        peak_bytes=memory.peaks(decision),
        base_bytes=machine.base_bytes,
    )
