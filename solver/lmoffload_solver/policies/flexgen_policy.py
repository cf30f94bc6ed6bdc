"""FlexGen's policies as decisions: uniform percentages, its granularity, its runtime.

Source of the traits: FMInference/FlexLLMGen at 004ffef, flexllmgen/flex_opt.py, pytorch_backend.py, compression.py.
"""

from __future__ import annotations

from lmoffload_solver.decision import Decision, KVUnit
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape
from lmoffload_solver.policies.flexgen_granularity import tensor_homes
from lmoffload_solver.policies.flexgen_model import PolicyRow
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import TensorClass, Tier

MAPPED_BYTES_PER_S = 2.6 * 2**30
"""One thread copying from a mapped file, page fault by page fault: FlexGen's cache reads of OPT-175B took 7046 s for 31 steps of 638 GB."""

FLEXGEN_4BIT = "int4-g64"
"""4 bits, groups of 64, asymmetric."""


def flexgen_runtime(*, overlap: bool = True, weights_page_locked: bool = True) -> Runtime:
    """FlexGen's traits: attention and MLP are modules of their own; after each module and micro-batch it synchronises; weights are
    page-locked, the cache is not; (de)quantization and attention are chains of PyTorch operators, weights dequantized for every
    micro-batch anew; one copy thread reads mapped files and uploads."""
    return Runtime(
        name="flexgen",
        overlap="barriers" if overlap else "none",
        halves=True,
        weights_page_locked=weights_page_locked,
        kv_page_locked=False,
        quantizing="eager",
        attending="eager",
        host_attending="eager",
        dequantizes_per="micro_batch",
        stages_disk=True,
        disk_bytes_per_s=MAPPED_BYTES_PER_S,
    )


def flexgen_decision(model: ModelShape, row: PolicyRow, runtime: Runtime | None = None) -> Decision:
    """The decision that a policy row is. A compressed cache is attended to on the GPU, whatever the row says.

    Raises:
        StatedError: the cache or the hidden states are split in a way that whole micro-batches cannot follow.
    """
    weights_device, weights_host, *_ = row.percent
    classes: set[TensorClass] = {t.tensor_class for t in model.tensors if t.is_matrix} if row.weights_4bit else set()
    cache = _cache_homes(row)
    attends: Tier = "host" if row.cpu_attention and not row.kv_4bit else "device"
    units = tuple(KVUnit(home, "device" if home == "device" else attends) for home in cache)
    hidden_device, hidden_host = row.percent[4:]
    hidden: Tier = "device" if hidden_device >= 50 else "host" if hidden_host >= 50 else "disk"
    if hidden == "disk":
        raise StatedError("A policy with hidden states on disk cannot be priced; keep them on the CPU.")
    return Decision(
        micro_batch=row.micro_batch,
        num_micro_batches=row.num_micro_batches,
        formats=dict.fromkeys(classes, FLEXGEN_4BIT),
        homes=tensor_homes(model, weights_device, weights_host),
        kv_format=FLEXGEN_4BIT if row.kv_4bit else "fp16",
        kv=(units,) * model.num_layers,
        hidden=hidden,
        prefetch_depth=1,
        runtime=runtime or flexgen_runtime(),
    )


def _cache_homes(row: PolicyRow) -> tuple[Tier, ...]:
    """Home of each micro-batch's cache: FlexGen splits every one alike; here as many whole ones as come nearest."""
    gpu, cpu = row.percent[2] / 100, row.percent[3] / 100
    count = row.num_micro_batches
    on_device, on_host = round(gpu * count), round((gpu + cpu) * count)
    tiers: list[Tier] = ["device"] * on_device
    host: Tier = "host"
    disk: Tier = "disk"
    return (*tiers, *[host] * (on_host - on_device), *[disk] * (count - on_host))
