"""One sequence of a job as it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lmoffload.executor.request import Request, Score
from lmoffload.executor.sampling import Sampler
from lmoffload_solver.errors import StatedError

SCORED_TOGETHER = 32
"""Positions whose probabilities are computed at once: a copy of so many logits."""


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
    log_probabilities: list[float] = field(default_factory=list)
    """Of the generated tokens, where they are asked for."""
    scores: list[Score] = field(default_factory=list)
    """Of the tokens that were given, step by step, where they are asked for."""

    @property
    def active(self) -> bool:
        return self.finish_reason is None

    @property
    def fresh(self) -> bool:
        """Its prompt is still to be computed."""
        return len(self.tokens) == len(self.request.token_ids)

    @property
    def room(self) -> int:
        """Tokens that it may come to, its prompt's included."""
        return len(self.request.token_ids) + self.request.max_new_tokens

    @property
    def most_steps(self) -> int:
        """Steps that it still takes at most."""
        return self.request.max_new_tokens - len(self.generated)

    def score(self, logits: torch.Tensor) -> None:
        """What each of its newest positions says of the token after it, where that is given, from their logits [T, vocabulary]."""
        known = len(self.tokens)
        given = (*self.tokens, *self.forced[len(self.generated) :])[known - logits.shape[0] + 1 : known + 1]
        for at in range(0, len(given), SCORED_TOGETHER):
            targets = torch.tensor(given[at : at + SCORED_TOGETHER])
            part = logits[at : at + len(targets)]
            chosen = torch.log_softmax(part, dim=-1).gather(1, targets[:, None])[:, 0]
            self.scores.append(Score(chosen, part.argmax(dim=-1)))

    def choose(self, logits: torch.Tensor, likeliest: int) -> int:
        """The next token, from the row's logits [vocabulary] and the likeliest token of them."""
        if self.forced:
            return self.forced[len(self.generated)]
        token = likeliest if self.sampler.plain else self.sampler.next_token(logits.cpu(), self.tokens)
        if self.request.log_probabilities:
            self.log_probabilities.append(float(logits[token] - torch.logsumexp(logits, dim=-1)))
        return token

    def take(self, token: int, stop_ids: frozenset[int], decode: Callable[[Sequence[int]], str] | None) -> None:
        """Grow by a token, and finish where it is the last. decode: text of tokens, for stop strings."""
        self.tokens.append(token)
        if token in stop_ids:
            self.finish_reason = "stop"
            return
        self.generated.append(token)
        if self.request.stop and decode is not None and _contains(decode(self.generated), self.request.stop):
            self.finish_reason = "stop"
        elif not self.most_steps:
            self.finish_reason = "length"


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


def _contains(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)
