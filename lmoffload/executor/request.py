"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

from lmoffload_solver.value import Resource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None leaves it to the model's own generation configuration.

    temperature 0 is greedy. The seed and the request's id alone decide a row's random numbers, never its batch.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: Sampling) -> Sampling:
        """These wishes, and the other's where there are none."""
        return replace(other, **{field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None})


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the engine needs `decode` for them."""
    log_probabilities: bool = False
    """Told of every token."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one prompt. `token_ids` leaves the end token out."""

    id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: Literal["stop", "length", "error"]
    error: str | None = None
    log_probabilities: tuple[float, ...] | None = None
    """Of each of `token_ids`, natural, as the model gives them before any setting of sampling; None where they were not asked for."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says of given tokens, one entry for every token but a text's first."""

    log_probabilities: torch.Tensor
    """fp32: of each token, given those before it."""
    likeliest: torch.Tensor
    """int64: the token that would have been likeliest."""

    def last(self, count: int) -> Score:
        """Of the last tokens alone."""
        return Score(self.log_probabilities[-count:], self.likeliest[-count:])

    @staticmethod
    def joined(parts: Sequence[Score]) -> Score:
        """Scores of consecutive tokens as one."""
        import torch

        return Score(torch.cat([part.log_probabilities for part in parts]), torch.cat([part.likeliest for part in parts]))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come."""

    step: int
    """Of the current block, 0 its prefill."""
    block: int
    block_done: bool
    """No row of the block has more to compute."""
    num_done: int
    num_prompts: int
    share: float
    """Of the work, weighed by what the plan predicts for prompts and new tokens; of completions that end early, all of it when they do."""
    predicted_s: float
    """What the plan predicts for all of it."""
    tokens_generated: int
    elapsed_s: float
    binds: Resource
    """Has worked longest so far."""
