"""This engine at work, by a plan that was made before: its own, or another system's policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer_protocol import SPAN_STEP, Job, serve

from lmoffload.environment import prepare_allocator, prepare_threads

if TYPE_CHECKING:
    from lmoffload.executor import Engine


def main(job: Job) -> dict[str, Any]:
    prepare_threads()
    prepare_allocator()
    import torch

    from lmoffload.checkpoint import open_checkpoint
    from lmoffload.executor import Engine
    from lmoffload_solver.plan import Plan
    from lmoffload_solver.value import read_value

    plan = read_value(Plan, Path(job.asked["plan"]), "plan")
    checkpoint = open_checkpoint(job.asked["model"])
    endless = replace(checkpoint, generation_config=None, config={**checkpoint.config, "eos_token_id": None})
    with Engine(endless, plan, keep_spans=True) as engine:
        job.loaded()
        tokens: list[list[int]] = []
        for _ in range(job.asked["repeats"]):
            job.begin()
            tokens = _complete(engine, job)
        _tell_step(engine, job)
    return job.answer(tokens, f"torch {torch.__version__}, {plan.threads['compute']} threads, {_choices(plan)}")


def _complete(engine: Engine, job: Job) -> list[list[int]]:
    from lmoffload.executor import Completion, Request, Sampling

    done: dict[int, Completion] = {}
    requests = [Request(str(i), tuple(p), job.gen_len, Sampling(temperature=0.0)) for i, p in enumerate(job.prompts)]
    for progress, _ in engine.steps(requests, done):
        job.at = progress.step
        job.token()
    return [list(done[i].token_ids) for i in range(len(requests))]


def _tell_step(engine: Engine, job: Job) -> None:
    """All that was done while the watched step computed, whichever step it was for."""
    wanted = min(SPAN_STEP, job.gen_len - 1)
    own = [span for span in engine.meter.spans if span.task.step == wanted and span.task.kind.startswith("compute")]
    if not own or not wanted:
        return
    begin, end = min(span.begin_s for span in own), max(span.end_s for span in own)
    for span in engine.meter.spans:
        if span.end_s > begin and span.begin_s < end:
            unit = engine.units[span.task.unit]
            name = unit.kind if unit.layer is None else f"layer {unit.layer}"
            job.span(span.task.resource, name, max(begin, span.begin_s), min(end, span.end_s))


def _choices(plan: Any) -> str:
    """The plan in some words."""
    total = sum(plan.weights.bytes.values()) or 1
    homes = ", ".join(f"{size / total:.0%} on {tier}" for tier, size in plan.weights.bytes.items() if size)
    return f"{plan.num_micro_batches} × {plan.micro_batch} prompts, weights {homes}, kernel {plan.kernels.decode}"


if __name__ == "__main__":
    serve(main)
