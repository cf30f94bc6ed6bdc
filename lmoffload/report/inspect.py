"""What a model is, readable."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from lmoffload.checkpoint import Inspection
from lmoffload.report.tables import facts, grid
from lmoffload.units import format_bytes, format_count


def inspect_tables(model: Inspection) -> Iterator[RenderableType]:
    """Geometry, bytes by class and format, remarks."""
    yield facts(f"{model.name} ({model.model_type})", _geometry(model))
    yield grid("Weights", ("class", "bytes"), ((name, format_bytes(size)) for name, size in model.class_bytes.items()))
    yield from (f"[yellow]{remark}[/yellow]" for remark in model.remarks)


def _geometry(model: Inspection) -> Iterator[tuple[str, str]]:
    active = f", {format_count(model.active_parameters)} of them for a token" if model.num_experts else ""
    yield "parameters", f"{format_count(model.num_parameters)}{active}"
    files = f" in {model.num_files} files" if model.num_files > 1 else ""
    yield "weights", f"{format_bytes(model.weights_bytes)}{files}"
    yield "stored as", ", ".join(f"{name} {format_bytes(size)}" for name, size in model.format_bytes.items())
    yield "layers", f"{model.num_layers}, the largest of {format_bytes(model.layer_bytes)}"
    yield "hidden, intermediate", f"{model.hidden_size}, {model.intermediate_size}"
    if model.num_experts:
        yield "experts", f"{model.num_experts} of {model.expert_size} in {model.sparse_layers} layers, {model.experts_per_token} a token"
    yield "heads", f"{model.num_heads}, of keys and values {model.num_kv_heads}, of {model.head_dim} each"
    tied = ", the output head is the embedding table" if model.tied_head else ""
    yield "vocabulary", f"{model.vocab_size}{tied}"
    if model.max_positions is not None:
        yield "positions", str(model.max_positions)
    windows = sorted({window for window in model.windows if window is not None})
    if windows:
        count = sum(window is not None for window in model.windows)
        yield "sliding window", f"{', '.join(map(str, windows))} tokens in {count} of {model.num_layers} layers"
    yield "KV cache per token", ", ".join(f"{format_bytes(size)} in {name}" for name, size in model.kv_bytes_per_token.items())
    if model.digest is not None:
        yield "digest", model.digest
