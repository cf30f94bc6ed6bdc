"""Plan: what to do, completely, and what is predicted for it. Field names are the contract of `plan --json`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.model import ModelShape
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import Goal, Quality, Resource, TaskClass, TensorClass, Tier, Value
from lmoffload_solver.workload import MOST_PROMPTS, Limits, Workload

MOST_THREADS, MOST_PREFETCH_DEPTH = 4096, 4096
Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class Named(Value):
    """Name and digest of the model or machine a plan was made for."""

    name: str
    digest: str
    place: str | None = None
    """Where it was found when the plan was made, so that `explain` finds it again: a path, or a name as the user wrote it."""


class AttentionPlace(Value):
    """Where attention runs, per phase."""

    prefill: Tier
    decode: Tier
    host_share: float = Field(ge=0, le=1)
    """Of the (layer, micro-batch) units of keys and values, those that the host attends to in decode."""
    host: tuple[tuple[int, int], ...] = ()
    """Those units, where a device attends to the others."""
    streams: Annotated[int, Field(gt=0, le=MOST_THREADS)] = 1
    """Of the host's attention beside a device, its threads shared out equally among them."""


class TensorPlan(Value):
    """Format in which a tensor is kept, and its home. Matrices with home "disk" are streamed to the compute tier each step."""

    format: str
    tier: Tier


class WeightsPlan(Value):
    format: dict[TensorClass, str]
    bytes: dict[Tier, Bytes]
    tensors: dict[str, TensorPlan]


class KVFormat(Value):
    key: str
    value: str


class KVPlan(Value):
    format: KVFormat
    bytes: dict[Tier, Bytes]
    homes: tuple[tuple[int, int, Tier], ...]
    """(layer, micro-batch, tier)."""


class HiddenPlan(Value):
    tier: Tier


class KernelsPlan(Value):
    """Linear kernel of each phase, a key of `lmoffload.kernels.linear.KERNELS`; or two of them as "QUANTIZED+STORED": the one for weights
    that were quantized, and the one for weights in their stored format."""

    prefill: str
    decode: str


def kernel_for(planned: str, format_name: str) -> str:
    """The kernel that a phase's plan names for weights in a format."""
    names = planned.split("+")
    return names[0] if format_name in QUANTIZED else names[-1]


class Predicted(Value):
    """Times of the whole job, but `step_s`: one decode step of a full block (mean over its steps)."""

    prefill_s: Seconds
    decode_s: Seconds
    total_s: Seconds
    tokens_per_s: float = Field(ge=0)
    decode_tokens_per_s: float = Field(ge=0)
    step_s: Seconds
    resources: dict[Resource, Seconds]
    """Busy seconds of each resource."""
    peak_bytes: dict[Tier, Bytes]
    """Includes `base_bytes`."""
    base_bytes: Bytes


class PolicyFigures(Value):
    tokens_per_s: float
    prefill_s: float
    decode_s: float


class ShadowPrice(Value):
    """Marginal price of a resource under the plan's discrete choices (a dual of the program)."""

    resource: str
    unit: Literal["GiB", "GB/s"]
    gain_tokens_per_s: float


class LooserQuality(Value):
    quality: Quality
    tokens_per_s: float
    loss: float | None


class Plan(Value):
    """What to do, completely."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    model: Named
    machine: Named
    workload: Workload
    limits: Limits = Field(default_factory=Limits)
    """What the user granted and fixed when the plan was made."""
    quality: Quality
    goal: Goal = "throughput"
    policy: str = "optimal"
    predicted_by_policy: PolicyFigures | None = None
    status: Literal["optimal", "time_limit"]
    bound_tokens_per_s: float
    gap: float
    micro_batch: int = Field(gt=0, le=MOST_PROMPTS)
    num_micro_batches: int = Field(gt=0, le=MOST_PROMPTS)
    attention: AttentionPlace
    weights: WeightsPlan
    kv: KVPlan
    hidden: HiddenPlan
    kernels: KernelsPlan
    threads: dict[TaskClass, Annotated[int, Field(gt=0, le=MOST_THREADS)]]
    prefetch_depth: int = Field(ge=0, le=MOST_PREFETCH_DEPTH)
    """Units read ahead of the one computed; the ring has prefetch_depth + 1 buffers."""
    prefill_chunk: Annotated[int, Field(gt=0)] | None = None
    """Tokens of a micro-batch's prompts that are computed at once, cut at whole blocks of 24; None: all of them. Results are the same."""
    refill: Annotated[int, Field(gt=0)] | None = None
    """Of a micro-batch's places, so many are taken by waiting prompts at once when their rows have finished before the block's last; None:
    none before it ends. Results are the same, and so is the work where all completions are equally long."""
    stream: Literal["layer", "matrix"] = "layer"
    """What streams at once: all streamed matrices of a layer, or each alone: smaller buffers, more switches."""
    layers_per_device: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Of each accelerator, in order, where there are several; the output head is the last one's. What a prediction or a report says of the
    tier "device", or of a resource that each has, is of the fullest, and of the busiest."""
    waves: Annotated[int, Field(gt=0, le=MOST_PROMPTS)] = 1
    """Into which a block's micro-batches are cut, to follow one another through several accelerators."""
    runtime: Runtime | None = None
    """The traits of another system, whose policy this is; None: lmoffload's own."""
    loss: float | None = None
    """Estimated loss of perplexity against the checkpoint's own precision, from what was measured for the formats in use; None: unknown."""
    predicted: Predicted
    binding: Resource
    shadow_prices: tuple[ShadowPrice, ...] = ()
    looser_quality: tuple[LooserQuality, ...] = ()
    solve_s: float
    programs_solved: int
    remarks: tuple[str, ...] = ()

    model_config = Value.model_config | {"populate_by_name": True, "serialize_by_alias": True}


def on_device(plan: Plan) -> bool:
    """Whether the compute tier is a device."""
    return plan.attention.prefill == "device"


def kept_model(model: ModelShape, plan: Plan) -> ModelShape:
    """The model with every tensor in the format that the plan keeps it in."""
    kept = {name: tensor.format for name, tensor in plan.weights.tensors.items()}
    return model if all(kept.get(t.name, t.format) == t.format for t in model.tensors) else model.with_formats(kept)
