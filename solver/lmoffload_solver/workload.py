"""Workload and Limits: what is to be done, and with how much of the machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape
from lmoffload_solver.value import Goal, Quality, Value

MOST_TOKENS = 10**9
"""Tokens of a prompt or a completion: beyond any model, and its products stay within 64 bits."""
MOST_PROMPTS = 10**6
"""Prompts of one job: the planner keeps a number for each, and takes seconds for this many."""


class PromptGroup(Value):
    """`count` prompts of `length` tokens each."""

    length: int = Field(gt=0, le=MOST_TOKENS)
    count: int = Field(gt=0, le=MOST_PROMPTS)


class Workload(Value):
    """What is to be done."""

    schema_version: Literal[1] = 1
    prompts: tuple[PromptGroup, ...] = Field(min_length=1)
    gen_len: int = Field(gt=0, le=MOST_TOKENS)
    goal: Goal = "throughput"
    quality: Quality = "exact"
    deadline_s: float | None = None
    scored: bool = False
    """The prompts' own tokens are scored, so that a prefill keeps the logits of all of them."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Workload:
        if self.num_prompts > MOST_PROMPTS:
            raise ValueError(f"there are more than {MOST_PROMPTS} prompts")
        return self

    @property
    def num_prompts(self) -> int:
        return sum(group.count for group in self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(group.count * group.length for group in self.prompts)

    @property
    def max_prompt_len(self) -> int:
        return max(group.length for group in self.prompts)

    @staticmethod
    def of_lengths(lengths: list[int], gen_len: int, quality: Quality = "exact") -> Workload:
        """The workload of prompts of these token counts, grouped by length, longest first.

        Raises:
            StatedError: they are more than one job may have, or longer than any model's.
        """
        if len(lengths) > MOST_PROMPTS:
            raise StatedError(f"The job has {len(lengths)} prompts; split it into jobs of at most {MOST_PROMPTS}.")
        longest = max([gen_len, *lengths])
        if longest > MOST_TOKENS:
            raise StatedError(f"A prompt or a completion of {longest} tokens is longer than any model takes.")
        counts: dict[int, int] = {}
        for length in lengths:
            counts[length] = counts.get(length, 0) + 1
        groups = tuple(PromptGroup(length=n, count=c) for n, c in sorted(counts.items(), reverse=True))
        return Workload(prompts=groups, gen_len=gen_len, quality=quality)


class Limits(Value):
    """What the user grants and fixes; None leaves it to the machine and the solver."""

    host_memory_bytes: int | None = Field(default=None, gt=0)
    """The whole process, its base included; an emulated device's memory comes on top."""
    device_memory_bytes: int | None = Field(default=None, gt=0)
    disk_space_bytes: int | None = Field(default=None, ge=0)
    weights_memory_bytes: int | None = Field(default=None, ge=0)
    """Homes and buffers of weights in the compute tier and host together."""
    weights_memory_share: float | None = Field(default=None, ge=0, le=1)
    """The same as a share of the model's weight bytes."""
    emulated_device: EmulatedDevice | None = None
    """Emulated on the machine that the profile is of."""
    threads: int | None = Field(default=None, gt=0)
    micro_batch: int | None = Field(default=None, gt=0)
    num_micro_batches: int | None = Field(default=None, gt=0)
    solve_s: float = Field(default=10.0, gt=0)
    """Time limit of the search."""


def check_length(shape: ModelShape, prompt_len: int, gen_len: int) -> None:
    """Raises:
    StatedError: prompt and completion exceed the positions that the model knows.
    """
    if shape.max_positions is not None and prompt_len + gen_len > shape.max_positions:
        raise StatedError(
            f"A prompt of {prompt_len} tokens and {gen_len} new ones exceed the {shape.max_positions} positions of {shape.name}; "
            "shorten the prompt or the completion."
        )
