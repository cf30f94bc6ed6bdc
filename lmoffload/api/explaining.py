"""Explaining a plan from its file."""

from __future__ import annotations

from pathlib import Path

from lmoffload.api.machine import Machine, machine_of
from lmoffload.api.model import Model, open_model
from lmoffload.api.planning import read_plan
from lmoffload.errors import StatedError
from lmoffload_solver.explain import Explanation, explain
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import read_value


def explain_file(path: Path, model: str | None, machine: str | None) -> tuple[Plan, Explanation]:
    """A plan and where its time goes.

    Raises:
        StatedError: the file is no plan, or what it was made for is not found or has changed.
    """
    plan, opened, on = opened_plan(path, model, machine)
    return plan, explain(opened.shape, on.profile, plan, limits=plan.limits, file_system=on.disk_for(opened.path))


def opened_plan(path: Path, model: str | None, machine: str | None) -> tuple[Plan, Model, Machine]:
    """A plan, its model and its machine. These are looked for where they were when the plan was made, unless named.

    Raises:
        StatedError: the file is no plan, or what it was made for is not found or has changed.
    """
    plan = read_value(Plan, path, "plan")
    place = model or plan.model.place
    if place is None:
        raise StatedError(f"The plan {path} does not say where its model {plan.model.name} lies; name it with --model.")
    opened = open_model(place)
    on = machine_of(machine or plan.machine.place, None, is_here=False)
    read_plan(path, opened, on)
    return plan, opened, on.emulating(plan.limits.emulated_device)
