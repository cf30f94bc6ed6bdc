"""When waiting prompts take the places of rows that have finished before their block's last.

A step costs what its reading does, or its computing's fixed part where that is more, however many of its places are taken: an idle place
wastes its share of that. Letting prompts in costs their forward's fixed part (its passes over the weights), where reading does not hide it;
their tokens are computed sooner or later in any case. Where a row of a micro-batch of b is as likely to finish in one step as another,
after G steps in the mean, the next of b - j rows finishes after G / (b - j) steps. Waiting until k places are free then costs, for each row
that comes in,

    (F + w G · sum over j < k of j / (b - j)) / k

seconds, and the best k is the one that costs least.
"""

from __future__ import annotations

import numpy as np

from lmoffload_solver.blocks import JobCosts, blocks_of
from lmoffload_solver.costs import DiskCosts, num_requests
from lmoffload_solver.memory import spilled_of
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import units_of


def best_places(micro_batch: int, num_steps: float, idle_s: float, join_s: float) -> int:
    """The best k.

    Args:
        micro_batch: b.
        num_steps: G, decode steps of a completion.
        idle_s: w, seconds that an idle place wastes in a step.
        join_s: F, seconds that a forward of new prompts adds to a step, their tokens left out.
    """
    free = np.arange(micro_batch)
    idle_steps = num_steps * np.cumsum(free / (micro_batch - free))
    return 1 + int(np.argmin((join_s + idle_s * idle_steps) / (free + 1)))


def refill_places(model: ModelShape, job: JobCosts, disk: DiskCosts, plan: Plan) -> int:
    """Places of a micro-batch that waiting prompts take at once, by a plan's costs (`Plan.refill`).

    Args:
        model: with its tensors in the formats that the plan keeps them in.
        job: priced at the plan's threads.
    """
    block = blocks_of(job.lengths, plan.micro_batch * plan.num_micro_batches)[0]
    decode = job.steps_seconds(block, plan.micro_batch, "decode", plan.kernels.decode, cut=plan.stream == "matrix")
    if not decode:
        return plan.micro_batch
    reads = [[piece.num_bytes for piece in unit.streamed] for unit in units_of(model, plan) if unit.streamed]
    reads += [[spilled.num_bytes] for spilled in spilled_of(model, plan).values()]
    read_s = sum(disk.read_seconds(sum(pieces), num_requests(pieces)) for pieces in reads)
    compute_s = job.total(decode[len(decode) // 2], 0, plan.weights.tensors[model.embedding.name].tier == "disk")
    step_s = max(read_s, plan.num_micro_batches * _fixed_s(model, job, plan.kernels.decode))
    join_s = max(0.0, compute_s + _fixed_s(model, job, plan.kernels.prefill) - max(read_s, compute_s))
    return best_places(
        plan.micro_batch, plan.workload.gen_len - 1, step_s / (plan.micro_batch * plan.num_micro_batches), join_s
    )


def _fixed_s(model: ModelShape, job: JobCosts, kernel: str) -> float:
    """Seconds of a micro-batch's forward over a single token, attention left out."""
    least = np.ones(1)
    layers = [job.costs.layer_seconds(kind, kernel, least)[0] for kind in job.kinds]
    fixed = sum(count * one for count, one in zip(job.layers_of_kind, layers, strict=True))
    return float(fixed + job.costs.head_seconds(model, kernel, least)[0] + job.costs.machine.overheads.step_s)
