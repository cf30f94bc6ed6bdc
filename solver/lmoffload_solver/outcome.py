"""Outcome: what a search ends with. Different words for different ends, so that none passes for another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmoffload_solver.plan import Plan


@dataclass(frozen=True)
class Optimal:
    """The best plan of the model of this machine: no plan of the domain is predicted to be faster."""

    plan: Plan
    bound: float
    """Tokens per second that no plan of the domain exceeds."""
    gap: float
    """(bound − predicted) / bound; 0 where it is proven."""


@dataclass(frozen=True)
class Infeasible:
    """No plan fits."""

    resource: str
    """"host memory", "device memory", "weights memory", "disk space" or "time"."""
    short_by_bytes: int
    """What the plan that needs least lacks."""
    what_would_help: str
    """One sentence."""


@dataclass(frozen=True)
class TimedOut:
    """The time limit came first. `best_so_far` is feasible; nothing is known to be faster than `bound`."""

    best_so_far: Plan | None
    bound: float
    """Tokens per second."""


Outcome = Optimal | Infeasible | TimedOut


def plan_in(outcome: Outcome) -> Plan | None:
    """The plan of an outcome, if it has one."""
    if isinstance(outcome, Infeasible):
        return None
    return outcome.best_so_far if isinstance(outcome, TimedOut) else outcome.plan


def with_plan(outcome: Outcome, plan: Plan) -> Outcome:
    """The same outcome with another plan in it."""
    if isinstance(outcome, Infeasible):
        return outcome
    return replace(outcome, best_so_far=plan) if isinstance(outcome, TimedOut) else replace(outcome, plan=plan)
