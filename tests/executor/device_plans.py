"""Plans with an emulated device, made by hand from a decision."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lmoffload.checkpoint import Checkpoint
from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.chain_plan import plan_of
from lmoffload_solver.counting import main_format
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.emulated import emulated
from lmoffload_solver.formats import KV_FORMATS
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.pipeline import ALONE, Pipeline
from lmoffload_solver.plan import Plan
from lmoffload_solver.runtime import Runtime, own_runtime
from lmoffload_solver.value import Tier
from lmoffload_solver.workload import Limits, Workload
from tests.cli.machines import KERNEL_OF, machine

GIB = 2**30
PLACES = (
    KVUnit("device", "device"), KVUnit("host", "device"), KVUnit("disk", "device"), KVUnit("host", "host"), KVUnit("disk", "host"),
)  # fmt: skip


def toy_machine() -> MachineProfile:
    """One whose curves know every format of keys and values, and the kernel for quantized weights."""
    base = machine()
    attention = [replaced for curve in base.attention for replaced in (curve.model_copy(update={"format": name}) for name in KV_FORMATS)]
    linear = [c.model_copy(update={"format": "int8", "kernel": "fused_dot"}) for c in base.linear if c.format == "bf16"]
    linear += [curve.model_copy(update={"kernel": "fused_dot"}) for curve in base.linear if curve.format == "bf16"]
    return base.model_copy(update={"attention": tuple(attention), "linear": (*base.linear, *linear)})


def make_decision(
    shape: ModelShape,
    *,
    homes: Tier | Mapping[str, Tier] = "host",
    kv: KVUnit | Sequence[Sequence[KVUnit]] = PLACES[0],
    hidden: Tier = "device",
    micro_batch: int = 2,
    num_micro_batches: int = 2,
    prefetch_depth: int = 1,
    kv_format: str = "fp32",
    runtime: Runtime | None = None,
    pipeline: Pipeline = ALONE,
) -> Decision:
    """homes: of all matrices, or of each; kv: of all units, or of each (layer, micro-batch)."""
    names = [tensor.name for tensor in shape.tensors if tensor.is_matrix]
    units = tuple((kv,) * num_micro_batches for _ in shape.layers) if isinstance(kv, KVUnit) else tuple(tuple(row) for row in kv)
    return Decision(
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        formats={},
        homes={name: homes[name] if isinstance(homes, Mapping) else homes for name in names},
        kv_format=kv_format,
        kv=units,
        hidden=hidden,
        prefetch_depth=prefetch_depth,
        prefill_products=KERNEL_OF[main_format(shape)],
        decode_products=KERNEL_OF[main_format(shape)],
        runtime=runtime or own_runtime(),
        pipeline=pipeline,
        threads={"compute": 1, "staging": 1, "host_attention": 1, "disk_io": 1},
    )


def random_decision(shape: ModelShape, chance: random.Random, **fixed: object) -> Decision:
    """Every choice at random, but for those that are fixed."""
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    names = [tensor.name for tensor in shape.tensors if tensor.is_matrix]
    count = fixed.get("num_micro_batches") or chance.choice([1, 2, 3])
    assert isinstance(count, int)
    choices = {
        "homes": {name: chance.choice(tiers) for name in names},
        "kv": [[chance.choice(PLACES) for _ in range(count)] for _ in shape.layers],
        "hidden": chance.choice(["device", "host"]),
        "micro_batch": chance.choice([1, 2, 3, 5]),
        "num_micro_batches": count,
        "prefetch_depth": chance.choice([0, 1, 2, 3, 4]),
        **fixed,
    }
    decision = make_decision(shape, **choices)  # type: ignore[arg-type]
    return replace(decision, prefetch_depth=max(1, decision.prefetch_depth)) if decision.host_attends else decision


def device_plan(
    checkpoint: Checkpoint,
    decision: Decision,
    lengths: Sequence[int],
    new_tokens: int,
    *,
    memory_bytes: int = GIB,
    bytes_per_s: float = 1e9,
) -> Plan:
    """The plan of a decision for prompts of these lengths."""
    exact = decision.kv_format == "fp32" and not decision.formats
    work = Workload.of_lengths(list(lengths), new_tokens, "exact" if exact else "any")
    count = decision.pipeline.num_stages
    device = EmulatedDevice(memory_bytes=memory_bytes, bytes_per_s=bytes_per_s, count=count)
    limits = Limits(emulated_device=device)
    return plan_of(Job(checkpoint.shape, work), emulated(toy_machine(), device), decision, digest=checkpoint.fingerprint, limits=limits)
