"""What is asked of the planner beside the work: goal, quality, another system's policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lmoffload.errors import UsageError
from lmoffload.units import parse_duration
from lmoffload_solver.value import Goal, Quality
from lmoffload_solver.workload import Workload

POLICIES = ("optimal", "accelerate", "zero-inference", "flexgen")


@dataclass(frozen=True, slots=True)
class Asked:
    """Goal, quality class and policy."""

    goal: Goal = "throughput"
    deadline_s: float | None = None
    quality: Quality = "exact"
    policy: str = "optimal"
    policy_file: Path | None = None

    def of(self, workload: Workload) -> Workload:
        """The workload with this goal and quality."""
        return workload.model_copy(update={"goal": self.goal, "deadline_s": self.deadline_s, "quality": self.quality})


def asked_of(
    *,
    goal: str = "throughput",
    deadline: str | None = None,
    quality: str = "exact",
    policy: str = "optimal",
    policy_file: Path | None = None,
) -> Asked:
    """What is asked, from words as people write them. A deadline sets its goal.

    Raises:
        UsageError: a word is not known, or two do not go together.
    """
    for name, value, known in (("goal", goal, get_args(Goal)), ("quality", quality, get_args(Quality)), ("policy", policy, POLICIES)):
        if value not in known:
            raise UsageError(f"The {name} {value!r} is not known; choose one of {', '.join(known)}.")
    if deadline is None and goal == "deadline":
        raise UsageError("The goal deadline needs --deadline DURATION, such as 90m.")
    if deadline is not None and goal == "latency":
        raise UsageError("Give --goal latency or --deadline, not both.")
    if policy_file is not None and policy not in ("optimal", "flexgen"):
        raise UsageError(f"--policy-file gives a FlexGen policy; it does not go with --policy {policy}.")
    words: Any = "deadline" if deadline is not None else goal
    seconds = None if deadline is None else parse_duration(deadline)
    allowed: Any = quality
    return Asked(words, seconds, allowed, policy, policy_file)
