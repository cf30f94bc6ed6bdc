"""Points to draw of a plan: its tasks on the device's roofline, and throughput against batch and memory."""

from __future__ import annotations

from dataclasses import dataclass

from lmoffload_solver import counting
from lmoffload_solver.chain_domain import grid
from lmoffload_solver.chain_plan import decision_of
from lmoffload_solver.chain_predict import costs_of
from lmoffload_solver.device_costs import DEVICE_ACTIVATION_BYTES, kv_elements
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import plan_in
from lmoffload_solver.plan import Plan
from lmoffload_solver.what_if import Change, changed

MEMORY_STEPS = (0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class RooflinePoint:
    """A kind of task: FLOPs per byte of device memory it reads, and FLOP/s that it is predicted to reach."""

    name: str
    flops_per_byte: float
    flops_per_s: float


@dataclass(frozen=True)
class Roofline:
    """The device's two limits and the plan's tasks."""

    bytes_per_s: float
    flops_per_s: float
    points: tuple[RooflinePoint, ...]


def roofline(model: ModelShape, machine: MachineProfile, plan: Plan) -> Roofline:
    """Products and attention of a layer, in prefill and in decode.

    Raises:
        StatedError: the machine has no device.
    """
    accelerator = machine.accelerator
    if accelerator is None:
        raise StatedError("A plan is drawn for a machine with a device; name one with --machine.")
    costs = costs_of(machine, decision_of(model, plan))
    rows, length = float(plan.micro_batch), float(plan.workload.max_prompt_len)
    matrices = counting.layer_matrices(model, 0)
    elements = sum(counting.matrix_size(t)[0] * counting.matrix_size(t)[1] for t in matrices)
    shape = model.layers[0]
    points = []
    for name, tokens in (("products, prefill", rows * length), ("products, decode", rows)):
        flops, num_bytes = 2 * tokens * elements, DEVICE_ACTIVATION_BYTES * (elements + 2 * tokens * model.hidden_size)
        points.append(RooflinePoint(name, flops / num_bytes, flops / costs.product_s(tokens, elements, len(matrices))))
    kv = rows * kv_elements(shape, counting.kv_tokens(shape, round(length)))
    flops = 2 * kv * shape.num_heads / shape.num_kv_heads
    points.append(
        RooflinePoint("attention, decode", flops / (DEVICE_ACTIVATION_BYTES * kv), flops / costs.decode_attention_s(kv))
    )
    flops = rows * counting.prefill_attention_flops(shape, round(length))
    moved = DEVICE_ACTIVATION_BYTES * rows * length * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.key_dim
    points.append(RooflinePoint("attention, prefill", flops / moved, flops / costs.prefill_attention_s(flops)))
    return Roofline(accelerator.memory_bytes_per_s, max(accelerator.products.flops_per_s), tuple(points))


def by_batch(model: ModelShape, machine: MachineProfile, plan: Plan) -> tuple[tuple[int, float], ...]:
    """(rows of the block, tokens per second of the best plan with the plan's number of micro-batches)."""
    found = []
    for size in grid(plan.workload.num_prompts, plan.workload.num_prompts):
        limits = plan.limits.model_copy(update={"micro_batch": size, "num_micro_batches": plan.num_micro_batches})
        rate = _rate(model, machine, plan.model_copy(update={"limits": limits}))
        if rate is not None:
            found.append((min(size * plan.num_micro_batches, plan.workload.num_prompts), rate))
    return tuple(sorted(dict(found).items()))


def by_memory(model: ModelShape, machine: MachineProfile, plan: Plan) -> tuple[tuple[float, float], ...]:
    """(bytes of device memory, tokens per second of the best plan)."""
    assert machine.accelerator is not None
    have = plan.limits.device_memory_bytes or machine.accelerator.memory_bytes
    found = []
    for share in MEMORY_STEPS:
        added = round(have * (share - 1))
        on, limits = changed(machine, plan.limits, Change(resource="device_memory", added_bytes=added))
        rate = _rate(model, on, plan.model_copy(update={"limits": limits}))
        if rate is not None:
            found.append((float(have + added), rate))
    return tuple(found)


def _rate(model: ModelShape, machine: MachineProfile, plan: Plan) -> float | None:
    from lmoffload_solver.search import solve

    found = plan_in(solve(model, machine, plan.workload, plan.limits, model_fingerprint=plan.model.digest))
    return None if found is None else found.predicted.tokens_per_s
