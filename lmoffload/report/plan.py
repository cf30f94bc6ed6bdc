"""A plan, readable: what it does and what is predicted for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from lmoffload.report.tables import facts
from lmoffload.units import format_bytes, format_number, format_seconds
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.outcome import Infeasible
from lmoffload_solver.plan import Named, Plan
from lmoffload_solver.workload import Workload


def plan_tables(plan: Plan) -> Iterator[RenderableType]:
    """The decisions, then the prediction."""
    yield facts(f"Plan for {plan.model.name} on {plan.machine.name}", _decisions(plan))
    yield facts("Predicted", _predictions(plan))


def infeasible_document(outcome: Infeasible, model: Named, machine: MachineProfile, workload: Workload) -> dict[str, Any]:
    """The document of `plan --json` where no plan exists."""
    return {
        "schema": 1,
        "model": model.model_dump(),
        "machine": {"name": machine.name, "digest": machine.fingerprint()},
        "workload": workload.model_dump(),
        "quality": workload.quality,
        "policy": "optimal",
        "status": "infeasible",
        "short": {"resource": outcome.resource, "bytes": outcome.short_by_bytes},
        "advice": outcome.what_would_help,
    }


def work_of(workload: Workload) -> str:
    """A workload in words."""
    prompts = format_number(workload.num_prompts, "prompt")
    if len(workload.prompts) == 1:
        lengths = format_number(workload.prompts[0].length, "token") + (" each" if workload.num_prompts > 1 else "")
    else:
        sizes = [group.length for group in workload.prompts]
        lengths = f"{min(sizes)} to {max(sizes)} tokens"
    return f"{prompts} ({lengths}), {format_number(workload.gen_len, 'new token')}" + (" each" if workload.num_prompts > 1 else "")


def _decisions(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "work", work_of(plan.workload)
    yield "block", f"{format_number(plan.num_micro_batches, 'micro-batch', 'micro-batches')} of {format_number(plan.micro_batch, 'prompt')}"
    if plan.prefill_chunk is not None:
        yield "prompts", f"computed {format_number(plan.prefill_chunk, 'token')} of a micro-batch at a time"
    if plan.refill is not None and plan.workload.num_prompts > plan.micro_batch * plan.num_micro_batches:
        yield "finished early", f"waiting prompts take {format_number(plan.refill, 'place')} of a micro-batch at once"
    yield "weights", ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in plan.weights.bytes.items() if size)
    formats = sorted(set(plan.weights.format.values()))
    yield "stored as", ", ".join(formats)
    yield "KV cache", f"{plan.kv.format.key} keys, {plan.kv.format.value} values; " + _sizes(plan.kv.bytes)
    yield "attention", f"prefill on {plan.attention.prefill}, decode on {plan.attention.decode}"
    yield "kernels", f"prefill {plan.kernels.prefill}, decode {plan.kernels.decode}"
    if plan.layers_per_device:
        waves = format_number(plan.waves, "wave")
        yield "accelerators", f"layers {', '.join(map(str, plan.layers_per_device))} in a row; a block passes in {waves}"
    yield "threads", ", ".join(f"{count} {task}" for task, count in plan.threads.items())
    if plan.weights.bytes.get("disk"):
        yield "read ahead", format_number(plan.prefetch_depth, *(("layer",) if plan.stream == "layer" else ("matrix", "matrices")))


def _predictions(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    yield "throughput", f"{predicted.tokens_per_s:.2f} tokens/s ({predicted.decode_tokens_per_s:.2f} in decode)"
    phases = f"prefill {format_seconds(predicted.prefill_s)}, decode {format_seconds(predicted.decode_s)}"
    yield "time", f"{format_seconds(predicted.total_s)}: {phases}"
    yield "a decode step", format_seconds(predicted.step_s)
    for tier, size in predicted.peak_bytes.items():
        if tier == "disk":
            continue
        base = f", of it {format_bytes(predicted.base_bytes)} the process itself" if tier == "host" else ""
        yield f"peak on {tier}", format_bytes(size) + base
    yield "binds", plan.binding
    yield "no plan exceeds", f"{plan.bound_tokens_per_s:.2f} tokens/s (gap {plan.gap:.1%})"
    programs = format_number(plan.programs_solved, "linear program")
    yield "search", f"{plan.status}, {programs} in {format_seconds(plan.solve_s)}"
    for price in plan.shadow_prices:
        yield f"one {price.unit} more of {price.resource.replace('_', ' ')}", f"{price.gain_tokens_per_s:+.3f} tokens/s"
    for looser in plan.looser_quality:
        loss = "loss not measured" if looser.loss is None else f"loss {looser.loss:.2%}"
        yield f"quality {looser.quality}", f"{looser.tokens_per_s:.2f} tokens/s, {loss}"


def _sizes(per_tier: dict[Any, int]) -> str:
    return ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in per_tier.items() if size) or "none"

