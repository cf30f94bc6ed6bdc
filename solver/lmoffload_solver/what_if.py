"""What more of the machine would give: the same work solved again on a changed machine, and the marginal price beside it."""

from __future__ import annotations

from typing import Literal

from lmoffload_solver.machine import Curve, MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import Infeasible, plan_in
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import Value
from lmoffload_solver.workload import Limits

Resource = Literal["host_memory", "device_memory", "disk", "link", "cores"]

PRICE_OF: dict[Resource, str] = {
    "host_memory": "host_memory",
    "device_memory": "device_memory",
    "disk": "disk_read",
    "link": "upload",
}
"""The plan's shadow price of a resource."""


class Change(Value):
    """More (or less) of one resource: bytes added to a memory, or a factor of a rate."""

    resource: Resource
    added_bytes: int = 0
    factor: float = 1.0


class Answer(Value):
    """What a change would give."""

    change: Change
    tokens_per_s: float | None
    """None where nothing fits."""
    gain: float | None
    """Relative to the plan solved again on the machine as it is."""
    by_price_tokens_per_s: float | None
    """What the plan's marginal price would make of it: right for small changes alone."""


class WhatIf(Value):
    """Answers to several changes, each alone, and all together where there is more than one."""

    schema_version: Literal[1] = 1
    tokens_per_s: float | None
    """Solved again on the machine as it is."""
    answers: tuple[Answer, ...]
    together: float | None = None
    """Tokens per second with all changes at once."""


def what_if(
    model: ModelShape, machine: MachineProfile, plan: Plan, changes: tuple[Change, ...], *, file_system: str | None = None
) -> WhatIf:
    """Solve a plan's work again under each change.

    Raises:
        StatedError: the profile lacks what the solver needs.
    """

    def solved(on: MachineProfile, limits: Limits) -> float | None:
        from lmoffload_solver.search import solve

        outcome = solve(model, on, plan.workload, limits, file_system=file_system, model_fingerprint=plan.model.digest)
        found = None if isinstance(outcome, Infeasible) else plan_in(outcome)
        return None if found is None else found.predicted.tokens_per_s

    base = solved(machine, plan.limits)
    answers = []
    for change in changes:
        rate = solved(*changed(machine, plan.limits, change))
        gain = None if rate is None or not base else rate / base - 1
        answers.append(Answer(change=change, tokens_per_s=rate, gain=gain, by_price_tokens_per_s=_by_price(machine, plan, change, base)))
    together = None
    if len(changes) > 1:
        on, limits = machine, plan.limits
        for change in changes:
            on, limits = changed(on, limits, change)
        together = solved(on, limits)
    return WhatIf(tokens_per_s=base, answers=tuple(answers), together=together)


def changed(machine: MachineProfile, limits: Limits, change: Change) -> tuple[MachineProfile, Limits]:
    """The machine and the user's limits with a change. More cores are taken to speed up what the host computes by that factor."""
    if change.resource == "host_memory":
        usable = max(1, machine.host.memory_usable_bytes + change.added_bytes)
        given = limits.host_memory_bytes
        return (
            machine.model_copy(update={"host": machine.host.model_copy(update={"memory_usable_bytes": usable})}),
            limits if given is None else limits.model_copy(update={"host_memory_bytes": max(1, given + change.added_bytes)}),
        )
    if change.resource == "device_memory":
        if machine.accelerator is None:
            return machine, limits
        memory = max(1, machine.accelerator.memory_bytes + change.added_bytes)
        given = limits.device_memory_bytes
        return (
            machine.model_copy(update={"accelerator": machine.accelerator.model_copy(update={"memory_bytes": memory})}),
            limits if given is None else limits.model_copy(update={"device_memory_bytes": max(1, given + change.added_bytes)}),
        )
    return _faster(machine, change), limits


def _faster(machine: MachineProfile, change: Change) -> MachineProfile:
    factor = change.factor
    if change.resource == "disk":
        disks = []
        for disk in machine.disks:
            curves = {
                name: tuple(c.model_copy(update={"bytes_per_s": _scaled(c.bytes_per_s, factor)}) for c in getattr(disk, name))
                for name in ("read", "write")
            }
            disks.append(disk.model_copy(update=curves))
        return machine.model_copy(update={"disks": tuple(disks)})
    if change.resource == "link":
        links = tuple(link.model_copy(update={"bytes_per_s": _scaled(link.bytes_per_s, factor)}) for link in machine.links)
        return machine.model_copy(update={"links": links})
    linear = tuple(c.model_copy(update={"flops_per_s": _scaled(c.flops_per_s, factor)}) for c in machine.linear)
    attention = tuple(c.model_copy(update={"rate": _scaled(c.rate, factor)}) for c in machine.attention)
    rates = tuple(r.model_copy(update={"per_s": r.per_s * factor}) if r.tier == "host" else r for r in machine.rates)
    return machine.model_copy(update={"linear": linear, "attention": attention, "rates": rates})


def _scaled(curve: Curve, factor: float) -> Curve:
    fit = curve.fit
    faster = None if fit is None else fit.model_copy(update={"rate_per_s": fit.rate_per_s * factor, "latency_s": fit.latency_s / factor})
    return curve.model_copy(update={"y": tuple(rate * factor for rate in curve.y), "fit": faster})


def _by_price(machine: MachineProfile, plan: Plan, change: Change, base: float | None) -> float | None:
    price = next((p for p in plan.shadow_prices if p.resource == PRICE_OF.get(change.resource)), None)
    if price is None or base is None:
        return None
    if price.unit == "GiB":
        return base + price.gain_tokens_per_s * change.added_bytes / 2**30
    curves = [c.bytes_per_s for c in machine.disks[0].read] if change.resource == "disk" else [
        link.bytes_per_s for link in machine.links if link.direction == "upload" and link.page_locked
    ]  # fmt: skip
    rate = max(max(curve.y) for curve in curves)
    return base + price.gain_tokens_per_s * rate * (change.factor - 1) / 1e9
