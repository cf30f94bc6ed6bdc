"""Workload and Limits: what is to be done, and with how much of the machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmoffload_solver.value import Goal, Quality, Value


class PromptGroup(Value):
    """`count` prompts of `length` tokens each."""

    length: int = Field(gt=0)
    count: int = Field(gt=0)


class Workload(Value):
    """What is to be done."""

    schema_version: Literal[1] = 1
    prompts: tuple[PromptGroup, ...] = Field(min_length=1)
    gen_len: int = Field(gt=0)
    goal: Goal = "throughput"
    quality: Quality = "exact"
    deadline_s: float | None = None

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
        """The workload of prompts of these token counts, grouped by length, longest first."""
        counts: dict[int, int] = {}
        for length in lengths:
            counts[length] = counts.get(length, 0) + 1
        groups = tuple(PromptGroup(length=n, count=c) for n, c in sorted(counts.items(), reverse=True))
        return Workload(prompts=groups, gen_len=gen_len, quality=quality)


class Limits(Value):
    """What the user grants and fixes; None leaves it to the machine and the solver."""

    host_memory_bytes: int | None = Field(default=None, gt=0)
    """The whole process, its base included."""
    device_memory_bytes: int | None = Field(default=None, gt=0)
    disk_space_bytes: int | None = Field(default=None, ge=0)
    weights_memory_bytes: int | None = Field(default=None, ge=0)
    """Homes and buffers of weights in the compute tier and host together."""
    weights_memory_share: float | None = Field(default=None, ge=0, le=1)
    """The same as a share of the model's weight bytes."""
    threads: int | None = Field(default=None, gt=0)
    micro_batch: int | None = Field(default=None, gt=0)
    num_micro_batches: int | None = Field(default=None, gt=0)
    solve_s: float = Field(default=10.0, gt=0)
    """Time limit of the search."""
