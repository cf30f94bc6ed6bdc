"""LossTable: what each format costs a model in quality, as measured on a text. What is absent is unknown, not zero."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from lmoffload_solver.formats import FORMATS
from lmoffload_solver.plan import Named
from lmoffload_solver.value import Quality, Value

What = Literal["weights", "kv"]
Activations = Literal["fp32", "int8"]

QUALITY_BOUND: Mapping[Quality, float] = MappingProxyType({"int8": 0.01, "int4": 0.10})
"""The loss that a format may have to be offered in a class; "any" has no bound, "exact" no loss."""


class Part(NamedTuple):
    """What may lose quality in a plan: the weights kept in a format and the activations they are multiplied with, or keys and values."""

    what: What
    format: str
    activations: Activations = "fp32"
    """What activations are rounded to in the linear layers of these weights (the kernel says it); nothing to say of "kv"."""

    @property
    def exact(self) -> bool:
        """Weights as the checkpoint stores them, and keys and values in fp32, lose nothing."""
        stored = self.format in FORMATS if self.what == "weights" else self.format == "fp32"
        return stored and self.activations == "fp32"


class Loss(Value):
    """One measured part: everything of a kind in one format, all else exact."""

    what: What
    format: str
    activations: Activations = "fp32"
    rounding: str | None = None
    """How the weights were rounded, as their store's manifest says; None for keys and values."""
    perplexity: float = Field(gt=0)
    loss: float
    """perplexity / reference - 1."""
    equal_tokens: float = Field(ge=0, le=1)
    """Share of the text's positions at which the likeliest next token is the reference's, the text before given."""

    @property
    def part(self) -> Part:
        return Part(self.what, self.format, self.activations)


class MeasuredText(Value):
    """The text that losses were measured on."""

    name: str
    digest: str
    """First 16 hex digits of the SHA-256 of its token ids, as measured: little-endian 32-bit numbers."""
    tokens: int = Field(gt=0)
    """Tokens that were predicted."""


class LossTable(Value):
    """Losses of one model on one text against the model as it is stored, computed in fp32."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    model: Named
    text: MeasuredText
    reference_perplexity: float = Field(gt=0)
    losses: tuple[Loss, ...]

    model_config = Value.model_config | {"populate_by_name": True, "serialize_by_alias": True}

    @model_validator(mode="after")
    def _each_once(self) -> LossTable:
        if len({loss.part for loss in self.losses}) != len(self.losses):
            raise ValueError("a part is measured twice")
        return self

    @cached_property
    def by_part(self) -> dict[Part, Loss]:
        return {loss.part: loss for loss in self.losses}


def loss_of(table: LossTable | None, *parts: Part) -> float | None:
    """The loss of these parts together; None where one of them is unknown.

    Several are estimated by the sum of what each costs alone: rounding errors of different tensors are nearly independent, so their
    effects on the log-likelihood add to first order. One part is as it was measured.
    """
    total = 0.0
    for part in parts:
        if part.exact:
            continue
        found = None if table is None else table.by_part.get(part)
        if found is None:
            return None
        total += found.loss
    return total


def allowed(table: LossTable | None, quality: Quality, part: Part) -> bool:
    """Whether a part's measured loss lets it be offered in a class; what is unknown may be. Bits are another matter (`QUALITY_BITS`)."""
    if quality == "exact":
        return part.exact
    loss, bound = loss_of(table, part), QUALITY_BOUND.get(quality)
    return loss is None or bound is None or loss <= bound
