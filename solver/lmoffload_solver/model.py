"""ModelShape: what a model is, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from pydantic import Field

from lmoffload_solver.formats import QUANTIZED, format_of
from lmoffload_solver.value import TensorClass, Value


class TensorShape(Value):
    """One tensor of the checkpoint, named as transformers names the parameter it becomes."""

    name: str
    shape: tuple[int, ...]
    format: str
    """Stored format, a key of `formats.FORMATS`."""
    tensor_class: TensorClass
    layer: int | None = None
    """Decoder layer that uses it, or None outside the layers."""
    is_matrix: bool = False
    """True for the weight of a linear layer [out_features, in_features] (or the embedding table): a tensor that a kernel reads
    row by row and that may be streamed. False for vectors (norms, biases), which are always resident."""
    is_table: bool = False
    """True for a further table whose rows are looked up (learned positions): never held, read through a mapping of its file."""
    num_runs: int = Field(default=1, gt=0)
    """In how many places of its files it lies at most, in equal parts: experts are stored one by one."""

    @property
    def num_experts(self) -> int:
        """Matrices [N, K] that a tensor [E, N, K] of class "experts" holds; 1 for any other."""
        return self.shape[0] if self.tensor_class == "experts" else 1

    def can_become(self, format_name: str) -> bool:
        """Whether it can be quantized to a format: a matrix whose rows are whole groups, and no tile shared by two experts."""
        if not self.is_matrix or format_name not in QUANTIZED:
            return False
        whole_tiles = self.num_experts == 1 or self.shape[-2] % format_of(format_name).tile_rows == 0
        return whole_tiles and self.shape[-1] % QUANTIZED[format_name].block_elements == 0


class LayerShape(Value):
    """Geometry of one decoder layer's attention and KV cache."""

    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    key_dim: int = Field(gt=0)
    value_dim: int = Field(gt=0)
    window: int | None = None
    """Tokens that a sliding window keeps; None for full attention."""


class ModelShape(Value):
    """What the model is: made from the configuration and the headers of the weight files alone."""

    schema_version: Literal[1] = 1
    name: str
    model_type: str
    """`model_type` of the transformers configuration, e.g. "llama"."""
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_positions: int | None = None
    rotary_follows_length: bool = False
    """A token's rotary embedding depends on its prompt's length, so that prompts are not cut (`Plan.prefill_chunk`)."""
    experts_per_token: int = Field(default=0, ge=0)
    """Experts that a token's router chooses in a layer of experts; 0 in a model without any."""
    expert_size: int = Field(default=0, ge=0)
    """Intermediate size of one expert."""
    layers: tuple[LayerShape, ...]
    tensors: tuple[TensorShape, ...]
    """Every tensor once, in the order of the layers. A tied head is not listed: see `tied_head`."""
    tied_head: bool = False
    """The output head is the embedding table: one tensor of class "embedding", counted once, loaded once."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mlp_width(self) -> int:
        """Activations of one token inside an MLP: those of all its experts, where that is more."""
        return max(self.intermediate_size, self.experts_per_token * self.expert_size)

    @cached_property
    def has_scalar_gates(self) -> bool:
        """Whether a linear layer gives one number a token, as the gate of a shared expert does."""
        return any(tensor.is_matrix and tensor.shape[-2] == 1 for tensor in self.tensors)

    def with_formats(self, formats: Mapping[str, str]) -> ModelShape:
        """The same model with some of its tensors, by name, in other formats."""
        tensors = tuple(t.model_copy(update={"format": formats.get(t.name, t.format)}) for t in self.tensors)
        fields = {name: getattr(self, name) for name in ModelShape.model_fields}
        return ModelShape(**{**fields, "tensors": tensors})  # a copy would keep what was computed from the old tensors

    @cached_property
    def by_name(self) -> dict[str, TensorShape]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def by_layer(self) -> tuple[tuple[TensorShape, ...], ...]:
        """The tensors of each decoder layer."""
        return tuple(tuple(t for t in self.tensors if t.layer == i) for i in range(self.num_layers))

    @cached_property
    def embedding(self) -> TensorShape:
        """The token embedding table [vocab, hidden] (the largest tensor of its class)."""
        tables = [t for t in self.tensors if t.tensor_class == "embedding" and t.is_matrix]
        return max(tables, key=lambda t: t.shape[0] * t.shape[-1])

    @cached_property
    def head(self) -> TensorShape:
        """The output head [vocab, hidden]: its own tensor, or the embedding table when tied."""
        if self.tied_head:
            return self.embedding
        return next(t for t in self.tensors if t.tensor_class == "head" and t.is_matrix)
