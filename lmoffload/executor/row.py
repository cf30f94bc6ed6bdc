"""One sequence of a job as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lmoffload.executor.request import Request, Score
from lmoffload.executor.sampling import Sampler
from lmoffload_solver.errors import StatedError


@dataclass(slots=True)
class Row:
    """One sequence as it grows."""

    request: Request
    sampler: Sampler
    tokens: list[int]
    """Prompt and generated tokens; the newest one has no keys and values yet."""
    finish_reason: Literal["stop", "length", "error"] | None = None
    generated: list[int] = field(default_factory=list)
    """Tokens of the completion, the end token left out."""
    forced: tuple[int, ...] = ()
    """Tokens that the completion takes, whatever is likelier: a given text that is scored."""
    scores: list[Score] = field(default_factory=list)
    """Of the tokens that were given, step by step, where they are asked for."""

    @property
    def active(self) -> bool:
        return self.finish_reason is None


def make_row(request: Request, defaults: Mapping[str, Any], vocab_size: int) -> Row:
    """A row for a request.

    Raises:
        StatedError: the prompt is empty or holds a token outside the vocabulary.
    """
    if not request.token_ids:
        raise StatedError("The prompt is empty.")
    if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
        raise StatedError(f"The prompt holds a token outside the model's vocabulary of {vocab_size}.")
    return Row(request, Sampler.of(request, defaults, vocab_size), list(request.token_ids))


def scored_row(text: Sequence[int], num_decoded: int, vocab_size: int) -> Row:
    """A row for a given text, whose last `num_decoded` tokens are fed one by one.

    Raises:
        StatedError: as `make_row` does.
    """
    prefix = tuple(text[: len(text) - num_decoded])
    row = make_row(Request("scored", prefix, max(1, num_decoded)), {}, vocab_size)
    row.forced = tuple(text[len(prefix) :])
    return row
