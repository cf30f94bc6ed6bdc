"""Plans made by hand for executor tests: whole tensors resident up to a budget, the rest streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lmoffload_solver.counting import kv_bytes
from lmoffload_solver.formats import stored_bytes
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import (
    AttentionPlace,
    HiddenPlan,
    KernelsPlan,
    KVFormat,
    KVPlan,
    Named,
    Plan,
    Predicted,
    TensorPlan,
    WeightsPlan,
)
from lmoffload_solver.workload import Workload


def make_plan(
    shape: ModelShape,
    fingerprint: str,
    *,
    resident: set[str] | None = None,
    micro_batch: int = 2,
    num_micro_batches: int = 2,
    prefetch_depth: int = 1,
    threads: int = 2,
    tokens: int = 4096,
    kernel: str = "widen_tiles",
    stream: Literal["layer", "matrix"] = "layer",
    formats: Mapping[str, str] | None = None,
    kv: tuple[str, str] = ("fp32", "fp32"),
) -> Plan:
    """A plan with these matrices resident (None: all), room for `tokens` tokens a row, and nothing predicted. kv: of keys and values."""
    tensors, sizes = {}, {"host": 0, "disk": 0}
    for tensor in shape.tensors:
        tier = "disk" if tensor.is_table else "host" if resident is None or not tensor.is_matrix or tensor.name in resident else "disk"
        tensors[tensor.name] = TensorPlan(format=(formats or {}).get(tensor.name, tensor.format), tier=tier)
        sizes[tier] += stored_bytes(tensor.shape, tensors[tensor.name].format)
    return Plan(
        model=Named(name=shape.name, digest=fingerprint),
        machine=Named(name="none", digest="none"),
        workload=Workload.of_lengths([1], 1),
        quality="exact" if kv == ("fp32", "fp32") and not formats else "any",
        status="optimal",
        bound_tokens_per_s=1.0,
        gap=0.0,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        attention=AttentionPlace(prefill="host", decode="host", host_share=1.0),
        weights=WeightsPlan(format={}, bytes=sizes, tensors=tensors),
        kv=KVPlan(
            format=KVFormat(key=kv[0], value=kv[1]),
            bytes={"host": kv_bytes(shape, tokens, *kv) * micro_batch * num_micro_batches},
            homes=(),
        ),
        hidden=HiddenPlan(tier="host"),
        kernels=KernelsPlan(prefill=kernel, decode=kernel),
        threads={"compute": threads, "disk_io": 2},
        prefetch_depth=prefetch_depth,
        stream=stream,
        predicted=Predicted(
            prefill_s=1, decode_s=1, total_s=2, tokens_per_s=1, decode_tokens_per_s=1, step_s=1, resources={}, peak_bytes={}, base_bytes=1
        ),
        binding="disk_read",
        solve_s=0,
        programs_solved=0,
    )
