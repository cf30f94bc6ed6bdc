"""A plan, every field of it, from what the search found."""

from __future__ import annotations

from dataclasses import dataclass

from lmoffload_solver import counting
from lmoffload_solver.candidate import Candidate
from lmoffload_solver.costs import COMPUTE_RESOURCE, READ_RESOURCE
from lmoffload_solver.evaluate import Evaluator, Simulated
from lmoffload_solver.kv_homes import layers_on_disk
from lmoffload_solver.loss import LossTable
from lmoffload_solver.plan import (
    AttentionPlace,
    HiddenPlan,
    KernelsPlan,
    KVFormat,
    KVPlan,
    LooserQuality,
    Named,
    Plan,
    Predicted,
    ShadowPrice,
    TensorPlan,
    WeightsPlan,
)
from lmoffload_solver.program import Program
from lmoffload_solver.refill import refill_places
from lmoffload_solver.rounding import Placement
from lmoffload_solver.schedule import READ_REQUEST_BYTES
from lmoffload_solver.value import Resource, Tier
from lmoffload_solver.workload import Workload

GIB = 2**30
GIGABYTE = 1e9


@dataclass(frozen=True)
class Found:
    """A candidate with its best placement."""

    candidate: Candidate
    placement: Placement
    simulated: Simulated
    bound_s: float
    solve_s: float = 0.0
    programs_solved: int = 0


def assemble(
    evaluator: Evaluator, found: Found, digest: str, losses: LossTable | None, looser: tuple[LooserQuality, ...], *, cut_short: bool
) -> Plan:
    """The plan of a candidate and its placement."""
    model, workload, candidate = evaluator.model, evaluator.workload, found.candidate
    near, far = evaluator.tiers[0], evaluator.tiers[1]
    on_disk = layers_on_disk(model.num_layers, candidate.kv_on_disk)
    tensors = evaluator.roundings[candidate.stream].tensors(found.placement)
    predicted = _predicted(evaluator, found, tensors)
    tokens = workload.num_prompts * workload.gen_len
    bound = max(tokens / found.bound_s, predicted.tokens_per_s)
    plan = Plan(
        model=Named(name=model.name, digest=digest),
        machine=Named(name=evaluator.machine.name, digest=evaluator.machine.fingerprint()),
        workload=workload,
        quality=workload.quality,
        goal=workload.goal,
        status="time_limit" if cut_short else "optimal",
        bound_tokens_per_s=bound,
        gap=(bound - predicted.tokens_per_s) / bound,
        micro_batch=candidate.micro_batch,
        num_micro_batches=candidate.num_micro_batches,
        attention=AttentionPlace(prefill=near, decode=near, host_share=1.0 if near == "host" else 0.0),
        weights=_weights(evaluator, tensors),
        kv=KVPlan(
            format=KVFormat(key=candidate.variant.kv_format, value=candidate.variant.kv_format),
            bytes=_kv_bytes(evaluator, candidate),
            homes=tuple(
                (layer, batch, far if layer in on_disk else near)
                for layer in range(model.num_layers)
                for batch in range(candidate.num_micro_batches)
            ),
        ),
        hidden=HiddenPlan(tier=near),
        kernels=KernelsPlan(prefill=candidate.prefill_kernel, decode=candidate.decode_kernel),
        threads={"compute": candidate.threads, "disk_io": evaluator.io_threads},
        prefetch_depth=candidate.prefetch_depth,
        prefill_chunk=candidate.prefill_chunk,
        stream=candidate.stream,
        predicted=predicted,
        binding=max(predicted.resources, key=lambda name: predicted.resources[name]),
        shadow_prices=_shadow_prices(evaluator, candidate, tokens),
        solve_s=found.solve_s,
        programs_solved=found.programs_solved,
        loss=candidate.variant.loss(losses, candidate.kernels),
        looser_quality=looser,
        remarks=(*evaluator.machine.remarks, *_unused_quality(workload, candidate)),
    )
    refill = refill_places(model, evaluator.job(candidate.threads), evaluator.disk, plan)
    return plan.model_copy(update={"refill": refill})


def _unused_quality(workload: Workload, candidate: Candidate) -> tuple[str, ...]:
    """A looser class that was allowed and is not made use of is told."""
    if workload.quality == "exact" or candidate.variant.lossy_parts:
        return ()
    return (f"Quality {workload.quality} is allowed, and nothing it allows would be quicker by this machine's profile: the plan is exact.",)


def _kv_bytes(evaluator: Evaluator, candidate: Candidate) -> dict[Tier, int]:
    """Of the first block, staging buffers included, by tier."""
    kv, size, rows = evaluator.memory.kv, candidate.micro_batch, candidate.block_rows
    sizes: dict[Tier, int] = {evaluator.tiers[0]: kv.host_bytes(size, rows, candidate.kv_on_disk)}
    if candidate.kv_on_disk:
        sizes[evaluator.tiers[1]] = kv.disk_bytes(size, rows, candidate.kv_on_disk)
    return sizes


def peak_bytes(evaluator: Evaluator, candidate: Candidate, placement: Placement) -> int:
    """Bytes of the compute tier at the peak."""
    return evaluator.parts(candidate, placement.head_at_home).total + placement.memory_bytes


def _predicted(evaluator: Evaluator, found: Found, tensors: dict[str, TensorPlan]) -> Predicted:
    simulated, workload = found.simulated, evaluator.workload
    tokens = workload.num_prompts * workload.gen_len
    near, far = evaluator.tiers[0], evaluator.tiers[1]
    on_disk = sum(counting.tensor_bytes(evaluator.model.by_name[name]) for name, t in tensors.items() if t.tier == far)
    on_disk += _kv_bytes(evaluator, found.candidate).get(far, 0)
    resources: dict[Resource, float] = {
        READ_RESOURCE[far]: simulated.prefill_busy[0] + simulated.decode_busy[0],
        COMPUTE_RESOURCE[near]: simulated.prefill_busy[1] + simulated.decode_busy[1],
    }
    if found.candidate.kv_on_disk:
        resources["disk_write"] = simulated.prefill_busy[2] + simulated.decode_busy[2]
    later = tokens - workload.num_prompts
    return Predicted(
        prefill_s=simulated.prefill_s,
        decode_s=simulated.decode_s,
        total_s=simulated.total_s,
        tokens_per_s=tokens / simulated.total_s,
        decode_tokens_per_s=later / simulated.decode_s if simulated.decode_s else 0.0,
        step_s=simulated.step_s,
        resources=resources,
        peak_bytes={near: peak_bytes(evaluator, found.candidate, found.placement), far: on_disk},
        base_bytes=evaluator.machine.base_bytes,
    )


def _weights(evaluator: Evaluator, tensors: dict[str, TensorPlan]) -> WeightsPlan:
    model = evaluator.model
    by_tier: dict[Tier, int] = dict.fromkeys(evaluator.tiers, 0)
    for name, tensor in tensors.items():
        by_tier[tensor.tier] += counting.tensor_bytes(model.by_name[name])
    classes = dict.fromkeys(tensor.tensor_class for tensor in model.tensors)
    return WeightsPlan(format={c: counting.main_format(model, c) for c in classes}, bytes=by_tier, tensors=tensors)


def _shadow_prices(evaluator: Evaluator, candidate: Candidate, tokens: int) -> tuple[ShadowPrice, ...]:
    """Duals as gains: d(tokens/s) = −tokens/T² · dT. One more byte of memory saves its dual in seconds; one more byte/s of the disk saves
    1/R of the seconds that wait for it."""
    choices = evaluator.program_choices(candidate)
    solution = Program(choices).solve()
    if solution is None:
        return ()
    gain = tokens / solution.total_s**2
    memory = max(0.0, solution.seconds_per_byte) * GIB * gain
    disk = max(0.0, solution.waiting_s) / evaluator.disk.best_rate(READ_REQUEST_BYTES) * GIGABYTE * gain
    resource = "weights_memory" if solution.duals.get("capacity.weights", 0.0) < 0 else "host_memory"
    return (
        ShadowPrice(resource=resource, unit="GiB", gain_tokens_per_s=memory),
        ShadowPrice(resource=READ_RESOURCE[evaluator.tiers[1]], unit="GB/s", gain_tokens_per_s=disk),
    )
