"""Measured times of a run: per task kind, per resource, per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmoffload_solver.plan import Predicted
from lmoffload_solver.schedule import Task
from lmoffload_solver.value import Kind, Resource


@dataclass(frozen=True, slots=True)
class Span:
    """One task as it was run; seconds since the run began."""

    task: Task
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Meter:
    """Adds up what tasks and steps took."""

    keep_spans: bool = False
    spans: list[Span] = field(default_factory=list)
    counts: dict[Kind, int] = field(default_factory=dict)
    seconds: dict[Kind, float] = field(default_factory=dict)
    busy: dict[Resource, float] = field(default_factory=dict)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_full_steps: int = 0
    """Decode steps of blocks as large as the first, with all their rows, and their time: what `step_s` is about."""
    full_steps_s: float = 0.0
    tokens: int = 0
    decode_tokens: int = 0
    """Tokens but each row's first, which the prefill gives."""
    prompts: int = 0

    def task(self, task: Task, begin_s: float, end_s: float) -> None:
        """Count a task that took from `begin_s` to `end_s`."""
        self.counts[task.kind] = self.counts.get(task.kind, 0) + 1
        self.seconds[task.kind] = self.seconds.get(task.kind, 0.0) + end_s - begin_s
        self.busy[task.resource] = self.busy.get(task.resource, 0.0) + end_s - begin_s
        if self.keep_spans:
            self.spans.append(Span(task, begin_s, end_s))

    def step(self, step: int, seconds: float, full: bool) -> None:
        """Count a step of a block; `full` when every micro-batch of a full block computed in it."""
        if step == 0:
            self.prefill_s += seconds
            return
        self.decode_s += seconds
        if full:
            self.num_full_steps += 1
            self.full_steps_s += seconds

    def figures(self, peak_bytes: int, base_bytes: int) -> Predicted:
        """The same quantities as a prediction, measured."""
        total = self.prefill_s + self.decode_s
        return Predicted(
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            total_s=total,
            tokens_per_s=self.tokens / total if total else 0.0,
            decode_tokens_per_s=self.decode_tokens / self.decode_s if self.decode_s else 0.0,
            step_s=self.full_steps_s / self.num_full_steps if self.num_full_steps else 0.0,
            resources=dict(self.busy),
            peak_bytes={"host": peak_bytes},
            base_bytes=base_bytes,
        )
