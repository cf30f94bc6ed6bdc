"""Planning: a model, a machine and a workload in, a plan out. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from lmoffload.api.asking import Asked
from lmoffload.api.losses import load_losses
from lmoffload.api.machine import Machine
from lmoffload.api.model import Model
from lmoffload.errors import InfeasibleError, StatedError, UsageError
from lmoffload.profiler.limits import memory_of_process, read_limits
from lmoffload.units import format_bytes
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.memory import peak
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import Infeasible, plan_in
from lmoffload_solver.plan import Named, Plan, on_device
from lmoffload_solver.soundness import check_plan
from lmoffload_solver.value import read_value
from lmoffload_solver.workload import MOST_PROMPTS, MOST_TOKENS, Limits, PromptGroup, Workload, check_length

DEFAULT_NUM_PROMPTS, DEFAULT_PROMPT_LEN, DEFAULT_GEN_LEN = 16, 256, 64


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A plan together with the model and the machine it was made for: what an engine needs."""

    plan: Plan
    model: Model
    machine: MachineProfile


class NoPlanError(InfeasibleError):
    """No plan exists within the limits; says for what, so that it can be written as a document."""

    def __init__(self, outcome: Infeasible, model: Model, machine: MachineProfile, workload: Workload) -> None:
        self.outcome, self.model, self.machine, self.workload = outcome, model, machine, workload
        super().__init__(outcome.what_would_help)


def synthetic_workload(shape: ModelShape, num_prompts: int | None, prompt_len: int | None, gen_len: int | None) -> Workload:
    """`num_prompts` prompts of `prompt_len` tokens, `gen_len` new ones each; what is not given takes a common value that the model has
    positions for.

    Raises:
        UsageError: a number is below 1, or beyond what any job has.
        StatedError: the model has no positions for so many tokens.
    """
    positions = MOST_TOKENS if shape.max_positions is None else shape.max_positions
    new = min(DEFAULT_GEN_LEN, max(1, positions // 2)) if gen_len is None else gen_len
    numbers = {
        "num-prompts": DEFAULT_NUM_PROMPTS if num_prompts is None else num_prompts,
        "prompt-len": min(DEFAULT_PROMPT_LEN, max(1, positions - new)) if prompt_len is None else prompt_len,
        "gen-len": new,
    }
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"The number given for {name} is {number}; it must be at least 1.")
        most = MOST_PROMPTS if name == "num-prompts" else MOST_TOKENS
        if number > most:
            raise UsageError(f"The number given for {name} is {number}; it must be at most {most}.")
    check_length(shape, numbers["prompt-len"], numbers["gen-len"])
    group = PromptGroup(length=numbers["prompt-len"], count=numbers["num-prompts"])
    return Workload(prompts=(group,), gen_len=numbers["gen-len"])


def solve_for(model: Model, machine: Machine, workload: Workload, limits: Limits, asked: Asked | None = None) -> ModelPlan:
    """The best plan within the limits, or another system's; the limits of the machine this runs on are read now.

    Raises:
        NoPlanError: none exists.
        StatedError: none was found in the time given.
        UsageError: a limit is of what the machine has not.
    """
    from lmoffload_solver.search import solve

    file_system = machine.disk_for(model.path)
    now = replace(machine, profile=_as_found_now(machine.profile)) if machine.is_here else machine
    profile, as_now = machine.emulating(limits.emulated_device).profile, now.emulating(limits.emulated_device).profile
    if limits.device_memory_bytes is not None and profile.accelerator is None:
        raise UsageError(f"The machine {profile.name} has no device whose memory --device-memory could limit.")
    if asked is not None and (asked.policy_file is not None or asked.policy != "optimal"):
        plan: Plan | None = _by_policy(model, as_now, workload, limits, asked, file_system)
    else:
        losses = None if model.checkpoint is None else load_losses(model.digest)
        outcome = solve(model.shape, as_now, workload, limits, file_system=file_system, model_fingerprint=model.digest, losses=losses)
        if isinstance(outcome, Infeasible):
            raise NoPlanError(outcome, model, profile, workload)
        plan = plan_in(outcome)
    if plan is None:
        raise StatedError(f"No plan was found within {limits.solve_s:g} s; allow more with --solve-time.")
    known = {
        "model": Named(name=model.shape.name, digest=model.digest, place=model.place),
        "machine": Named(name=profile.name, digest=profile.fingerprint(), place=machine.place),
        "limits": limits,
    }
    return ModelPlan(plan.model_copy(update=known), model, profile)


def _by_policy(model: Model, machine: MachineProfile, workload: Workload, limits: Limits, asked: Asked, file_system: str | None) -> Plan:
    """The plan of another system's policy, or of a policy file."""
    from lmoffload_solver.policies.price import Policy, price_policy, price_row, read_rows

    if asked.policy_file is not None:
        row = read_rows(asked.policy_file, model.shape, workload)
        return price_row(row, model.shape, machine, workload, limits, file_system=file_system, digest=model.digest)
    named = cast(Policy, asked.policy)
    return price_policy(named, model.shape, machine, workload, limits, file_system=file_system, digest=model.digest)


def read_plan(path: Path, model: Model, machine: Machine) -> ModelPlan:
    """A plan from a file, for this model on this machine.

    Raises:
        StatedError: the file is no plan, was made for another model or machine, or does not hold on them.
    """
    plan = read_value(Plan, path, "plan")
    machine = machine.emulating(plan.limits.emulated_device)
    _require_same(path, "model", plan.model, model.shape.name, model.digest)
    _require_same(path, "machine or another profile of it", plan.machine, machine.profile.name, machine.profile.fingerprint())
    if machine.is_here or machine.profile.accelerator is None:
        check_plan(model.shape, plan)
    _require_measured(path, plan, machine.profile)
    return ModelPlan(plan, model, machine.profile)


def _require_same(path: Path, what: str, planned: Named, name: str, digest: str) -> None:
    if planned.digest != digest:
        made_for, this = f"{planned.name}, digest {planned.digest}", f"{name}, {digest}"
        raise StatedError(f"The plan {path} was made for another {what} ({made_for}; this one is {this}): plan again.")


def _require_measured(path: Path, plan: Plan, profile: MachineProfile) -> None:
    if profile.accelerator is not None:
        return
    threads, formats = plan.threads["compute"], frozenset(t.format for t in plan.weights.tensors.values())
    measured = {curve.threads for curve in profile.linear if curve.format in formats}
    if threads not in measured:
        raise StatedError(f"The plan {path} has {threads} compute threads, which the machine's profile has not measured: plan again.")
    if not (plan.predicted.tokens_per_s and plan.predicted.total_s and plan.bound_tokens_per_s > 0):
        raise StatedError(f"The plan {path} predicts nothing: plan again.")


def require_room(path: Path, plan: Plan, shape: ModelShape) -> None:
    """The plan was made with what the machine had then; this is now. An emulated device's memory is this process's too.

    Raises:
        InfeasibleError: it needs more memory or cores than this process may use.
    """
    needed, usable = _process_bytes(plan, shape), memory_of_process()
    if needed > usable:
        raise InfeasibleError(
            f"The plan {path} needs {format_bytes(needed)} of memory, and this process may use {format_bytes(usable)} now: plan again."
        )
    threads, cores = plan.threads["compute"], read_limits().cores
    if threads > cores:
        raise InfeasibleError(f"The plan {path} has {threads} compute threads, and this process may use {cores} cores now: plan again.")


def has_room(plan: Plan, shape: ModelShape) -> bool:
    """Whether this process may use now what a plan needs."""
    return _process_bytes(plan, shape) <= memory_of_process() and plan.threads["compute"] <= read_limits().cores


def _process_bytes(plan: Plan, shape: ModelShape) -> int:
    """What a plan needs of this process's memory, an emulated device's included."""
    if not on_device(plan):
        return peak(shape, plan)
    peaks = plan.predicted.peak_bytes
    emulated = plan.limits.emulated_device
    return peaks["host"] + (0 if emulated is None else emulated.count * peaks["device"])


def check_fits(workload: Workload, plan: Plan) -> None:
    """Raises:
    StatedError: the plan, made before, has no room for this work.
    """
    planned = plan.workload
    for what, asked, room in (
        ("a prompt", workload.max_prompt_len, planned.max_prompt_len),
        ("a completion", workload.gen_len, planned.gen_len),
    ):
        if asked > room:
            raise StatedError(f"The plan has room for {what} of {room} tokens, but this work has one of {asked}; make a plan for it.")


def _as_found_now(profile: MachineProfile) -> MachineProfile:
    """The profile with what this process may have at this moment instead of what it might when the profile was made."""
    now = read_limits()
    return profile.model_copy(update={"host": now.model_copy(update={"memory_usable_bytes": memory_of_process()})})
