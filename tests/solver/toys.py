"""Machines and models made by hand, small enough that their answers are computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from lmoffload_solver.machine import (
    AttentionCurve,
    Contention,
    Curve,
    Disk,
    HostLimits,
    LinearCurve,
    MachineProfile,
    Overheads,
    Processor,
    TransferCurve,
)
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.workload import PromptGroup, Workload

MIB = 2**20


def curve(x: Sequence[float], y: Sequence[float]) -> Curve:
    return Curve(x=tuple(x), y=tuple(y), spread=(0.0,) * len(x))


def make_machine(
    memory_bytes: int = 256 * MIB,
    *,
    disk_bytes_per_s: float = 1e8,
    flops_per_s: float = 1e10,
    cores: int = 2,
    base_bytes: int = 8 * MIB,
    slowdowns: tuple[float, float] | None = None,
    overheads: Overheads | None = None,
    formats: Sequence[str] = ("fp32", "bf16"),
    speeds: Mapping[str, float] = MappingProxyType({}),
    kv_formats: Sequence[str] = ("fp32",),
) -> MachineProfile:
    """Two kernels: "wide" is quicker at many rows, "narrow" at few; a second thread gives 1.8 times the rate. "narrow" takes bf16 alone.

    Args:
        speeds: factors of the rates of formats.
    """
    linear = []
    for threads, speed in ((1, 1.0), (2, 1.8)):
        for name in formats:
            wide = curve((1, 16, 256, 1024), [flops_per_s * speed * speeds.get(name, 1.0) * share for share in (0.1, 0.5, 1.0, 1.0)])
            linear.append(LinearCurve(kernel="wide", format=name, threads=threads, n=64, k=64, flops_per_s=wide))
        narrow = curve((1, 16, 256), [flops_per_s * speed * share for share in (0.4, 0.6, 0.6)])
        linear.append(LinearCurve(kernel="narrow", format="bf16", threads=threads, n=64, k=64, flops_per_s=narrow))
    attention = []
    for threads, speed in ((1, 1.0), (2, 1.9)):
        prefill, decode = curve((16, 256), (1e9 * speed, 4e9 * speed)), curve((16, 256), (1e9 * speed, 2e9 * speed))
        attention.append(AttentionCurve(phase="prefill", format="fp32", threads=threads, rate=prefill))
        attention += [AttentionCurve(phase="decode", format=name, threads=threads, rate=decode) for name in kv_formats]
    read = tuple(
        TransferCurve(threads=threads, bytes_per_s=curve((65536, 4 * MIB), (disk_bytes_per_s * share * 0.5, disk_bytes_per_s * share)))
        for threads, share in ((1, 0.6), (2, 0.98), (4, 1.0))
    )
    contention = () if slowdowns is None else (
        Contention(first="compute", second="disk_read", first_slowdown=slowdowns[1], second_slowdown=slowdowns[0]),
    )  # fmt: skip
    return MachineProfile(
        name="toy",
        provenance="made by hand",
        host=HostLimits(
            memory_total_bytes=4 * memory_bytes,
            memory_usable_bytes=memory_bytes,
            memory_limited_by="physical",
            cores=cores,
            cores_limited_by="affinity",
            last_level_cache_bytes=MIB,
        ),
        processors=(Processor(tier="host", name="toy", cores=cores),),
        memory=(),
        disks=(Disk(file_system="/", device="toy", read=read, direct=True, cache_excluded=True, free_bytes=10**12, random_write_s=1e-6),),
        linear=tuple(linear),
        attention=tuple(attention),
        overheads=overheads
        or Overheads(layer_s=1e-4, step_s=2e-4, row_s=1e-5, linear_call_s={1: 1e-5}, elementwise_bytes_per_s=2e9, random_read_s=1e-4),
        contention=contention,
        base_bytes=base_bytes,
    )


def make_model(
    num_layers: int = 4,
    hidden: int = 64,
    intermediate: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab: int = 256,
    *,
    stored: str = "fp32",
    tied: bool = False,
    windows: Sequence[int | None] = (None,),
) -> ModelShape:
    """A Llama-shaped model; `windows` repeat over the layers."""
    dim = hidden // num_heads
    tensors = [TensorShape(name="embed", shape=(vocab, hidden), format=stored, tensor_class="embedding", is_matrix=True)]
    for i in range(num_layers):
        for name, shape, tensor_class in (
            ("q", (num_heads * dim, hidden), "attention"),
            ("k", (num_kv_heads * dim, hidden), "attention"),
            ("v", (num_kv_heads * dim, hidden), "attention"),
            ("o", (hidden, num_heads * dim), "attention"),
            ("gate", (intermediate, hidden), "mlp"),
            ("up", (intermediate, hidden), "mlp"),
            ("down", (hidden, intermediate), "mlp"),
        ):
            tensors.append(TensorShape(name=f"{i}.{name}", shape=shape, format=stored, tensor_class=tensor_class, layer=i, is_matrix=True))
        tensors.append(TensorShape(name=f"{i}.norm", shape=(hidden,), format=stored, tensor_class="norm", layer=i))
    tensors.append(TensorShape(name="norm", shape=(hidden,), format=stored, tensor_class="norm"))
    if not tied:
        tensors.append(TensorShape(name="head", shape=(vocab, hidden), format=stored, tensor_class="head", is_matrix=True))
    layers = tuple(
        LayerShape(num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=dim, value_dim=dim, window=windows[i % len(windows)])
        for i in range(num_layers)
    )
    return ModelShape(
        name="toy",
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab,
        layers=layers,
        tensors=tuple(tensors),
        tied_head=tied,
    )


def make_work(count: int = 8, length: int = 16, gen_len: int = 8) -> Workload:
    return Workload(prompts=(PromptGroup(length=length, count=count),), gen_len=gen_len)
