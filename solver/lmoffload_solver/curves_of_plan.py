"""Points to draw of a plan: its tasks on the roofline of the processor that computes, and throughput against batch and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.accelerator import Accelerator
from lmoffload_solver.chain_domain import grid
from lmoffload_solver.chain_plan import decision_of
from lmoffload_solver.chain_predict import costs_of
from lmoffload_solver.costs import DiskCosts, LayerKind, MachineCosts
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import plan_in
from lmoffload_solver.plan import Plan, kept_model
from lmoffload_solver.roofline_processing import DEVICE_ACTIVATION_BYTES, RooflineProcessing, kv_elements
from lmoffload_solver.value import Tier
from lmoffload_solver.what_if import Change, changed

MEMORY_STEPS = (0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class RooflinePoint:
    """A kind of task: FLOPs per byte of the compute tier's memory it reads, and FLOP/s that it is predicted to reach."""

    name: str
    flops_per_byte: float
    flops_per_s: float


@dataclass(frozen=True)
class Roofline:
    """The two limits of the processor that computes, and the plan's tasks."""

    tier: Tier
    """Where it computes."""
    bytes_per_s: float
    flops_per_s: float
    points: tuple[RooflinePoint, ...]


def roofline(model: ModelShape, machine: MachineProfile, plan: Plan) -> Roofline:
    """Products and attention of a layer, in prefill and in decode.

    Raises:
        StatedError: the profile lacks what the plan needs.
    """
    accelerator = machine.accelerator
    if isinstance(accelerator, Accelerator):
        points = tuple(_device_points(model, machine, plan))
        return Roofline("device", accelerator.memory_bytes_per_s, max(accelerator.products.flops_per_s), points)
    threads = plan.threads["compute"]
    memory = [rate.bytes_per_s for rate in machine.memory if rate.tier == "host" and rate.threads <= threads]
    flops = [max(curve.flops_per_s.y) for curve in machine.linear if curve.threads == threads]
    if not memory or not flops:
        raise StatedError(f"The machine profile {machine.name!r} lacks rates of memory or products; run `lmoffload profile` again.")
    return Roofline(
        "host" if accelerator is None else "device", max(memory), max(flops), tuple(_host_points(kept_model(model, plan), machine, plan))
    )


def _host_points(model: ModelShape, machine: MachineProfile, plan: Plan) -> Iterator[RooflinePoint]:
    costs = MachineCosts(machine, DiskCosts(machine.disks[0], plan.threads["disk_io"]), plan.threads["compute"])
    kind, shape, kv_format = LayerKind.of(model, 0), model.layers[0], plan.kv.format.key
    rows, length = plan.micro_batch, plan.workload.max_prompt_len
    weights = sum(counting.tensor_bytes(t) for t in counting.layer_matrices(model, 0))
    for name, tokens, kernel in (("prefill", rows * length, plan.kernels.prefill), ("decode", rows, plan.kernels.decode)):
        seconds = sum(float(one[0]) for one in costs.linear_seconds(kind, kernel, np.array([float(tokens)])))
        flops, moved = counting.layer_linear_flops(model, 0, tokens), weights + 2 * counting.hidden_bytes(model, tokens)
        yield RooflinePoint(f"products, {name}", flops / moved, flops / seconds)
    width = shape.key_dim + shape.value_dim
    read = rows * counting.decode_attention_bytes(shape, length, kv_format, kv_format)
    flops = rows * 2 * shape.num_heads * width * counting.kv_tokens(shape, length)
    seconds = rows * float(costs.decode_attention_seconds(shape, [length], kv_format)[0])
    yield RooflinePoint("attention, decode", flops / read, flops / seconds)
    flops = round(rows * counting.prefill_attention_flops(shape, length))
    moved = rows * length * counting.ACTIVATION_BYTES * (shape.num_heads + shape.num_kv_heads) * width
    seconds = rows * float(costs.prefill_attention_seconds(shape, [length], kv_format)[0])
    yield RooflinePoint("attention, prefill", flops / moved, flops / seconds)


def _device_points(model: ModelShape, machine: MachineProfile, plan: Plan) -> Iterator[RooflinePoint]:
    costs = costs_of(machine, decision_of(model, plan)).processing
    assert isinstance(costs, RooflineProcessing)
    rows, length = float(plan.micro_batch), float(plan.workload.max_prompt_len)
    matrices = counting.layer_matrices(model, 0)
    elements = sum(counting.matrix_size(t)[0] * counting.matrix_size(t)[1] for t in matrices)
    shape = model.layers[0]
    for name, tokens in (("products, prefill", rows * length), ("products, decode", rows)):
        flops, num_bytes = 2 * tokens * elements, DEVICE_ACTIVATION_BYTES * (elements + 2 * tokens * model.hidden_size)
        yield RooflinePoint(name, flops / num_bytes, flops / costs.product_s(tokens, elements, len(matrices)))
    kv = rows * kv_elements(shape, counting.kv_tokens(shape, round(length)))
    flops = 2 * kv * shape.num_heads / shape.num_kv_heads
    yield RooflinePoint("attention, decode", flops / (DEVICE_ACTIVATION_BYTES * kv), flops / costs.decode_elements_s(kv))
    flops = rows * counting.prefill_attention_flops(shape, round(length))
    moved = DEVICE_ACTIVATION_BYTES * rows * length * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.key_dim
    yield RooflinePoint("attention, prefill", flops / moved, flops / costs.prefill_flops_s(flops))


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
    """(bytes of the compute tier's memory, tokens per second of the best plan)."""
    resource: Literal["device_memory", "host_memory"] = "host_memory" if machine.accelerator is None else "device_memory"
    granted = plan.limits.host_memory_bytes if machine.accelerator is None else plan.limits.device_memory_bytes
    have = granted or (machine.host.memory_usable_bytes if machine.accelerator is None else machine.accelerator.memory_bytes)
    found = []
    for share in MEMORY_STEPS:
        added = round(have * (share - 1))
        on, limits = changed(machine, plan.limits, Change(resource=resource, added_bytes=added))
        rate = _rate(model, on, plan.model_copy(update={"limits": limits}))
        if rate is not None:
            found.append((float(have + added), rate))
    return tuple(found)


def _rate(model: ModelShape, machine: MachineProfile, plan: Plan) -> float | None:
    from lmoffload_solver.search import solve

    found = plan_in(solve(model, machine, plan.workload, plan.limits, model_fingerprint=plan.model.digest))
    return None if found is None else found.predicted.tokens_per_s
