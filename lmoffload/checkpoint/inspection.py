"""Inspection: what a model is, for people and programs."""

from __future__ import annotations

from math import prod
from typing import Literal

from lmoffload.checkpoint.checkpoint import Checkpoint
from lmoffload_solver.counting import class_bytes, experts_met, kv_bytes_per_token, tensor_bytes, weights_bytes
from lmoffload_solver.model import ModelShape
from lmoffload_solver.value import TensorClass, Value


class Inspection(Value):
    """What `lmoffload inspect` tells."""

    schema_version: Literal[1] = 1
    name: str
    model_type: str
    digest: str | None
    """The fingerprint of the checkpoint; None for a named shape, which has no weights."""
    num_layers: int
    num_parameters: int
    """Every stored parameter once: a tied head is not counted again."""
    active_parameters: int
    """Those that one token meets: of a layer's experts, the chosen ones."""
    hidden_size: int
    intermediate_size: int
    num_experts: int
    """Of a layer that has any; 0 where none has."""
    experts_per_token: int
    expert_size: int
    """Intermediate size of one expert."""
    sparse_layers: int
    """Layers with experts."""
    vocab_size: int
    max_positions: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None: attends to all."""
    tied_head: bool
    num_files: int
    weights_bytes: int
    class_bytes: dict[TensorClass, int]
    format_bytes: dict[str, int]
    layer_bytes: int
    """Of the largest decoder layer."""
    kv_bytes_per_token: dict[str, int]
    """Over all layers, by format of keys and values; a sliding window caps the number of tokens kept."""
    remarks: tuple[str, ...]


def inspect(model: Checkpoint | ModelShape) -> Inspection:
    """What a model is: its sizes, its bytes by class and by format, and what is odd in its checkpoint."""
    shape = model.shape if isinstance(model, Checkpoint) else model
    format_bytes: dict[str, int] = {}
    for tensor in shape.tensors:
        format_bytes[tensor.format] = format_bytes.get(tensor.format, 0) + tensor_bytes(tensor)
    experts = [tensor for tensor in shape.tensors if tensor.tensor_class == "experts"]
    first = shape.layers[0]
    return Inspection(
        name=shape.name,
        model_type=shape.model_type,
        digest=model.fingerprint if isinstance(model, Checkpoint) else None,
        num_layers=shape.num_layers,
        num_parameters=sum(prod(tensor.shape) for tensor in shape.tensors),
        active_parameters=sum(prod(t.shape) * experts_met(shape, t) // t.num_experts for t in shape.tensors),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts=max((t.num_experts for t in experts), default=0),
        experts_per_token=shape.experts_per_token,
        expert_size=shape.expert_size,
        sparse_layers=len({t.layer for t in experts}),
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_dim,
        windows=tuple(layer.window for layer in shape.layers),
        tied_head=shape.tied_head,
        num_files=len(model.files) if isinstance(model, Checkpoint) else 0,
        weights_bytes=weights_bytes(shape),
        class_bytes=class_bytes(shape),
        format_bytes=format_bytes,
        layer_bytes=max(sum(tensor_bytes(tensor) for tensor in layer) for layer in shape.by_layer),
        kv_bytes_per_token={kind: sum(kv_bytes_per_token(layer, kind, kind) for layer in shape.layers) for kind in ("fp32", "bf16")},
        remarks=model.remarks if isinstance(model, Checkpoint) else (),
    )
