"""RunReport: what happened, in the same quantities as the prediction. Field names are the contract of `run --report`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmoffload_solver.costs import PHASES, Phase
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.performed import Part, Performed
from lmoffload_solver.plan import Named, Plan, Predicted
from lmoffload_solver.repriced import Repriced, measured_s
from lmoffload_solver.value import Kind, TaskClass, Tier, Value


class TaskFigures(Value):
    """Tasks of one kind: how many, and their seconds, summed."""

    count: int
    predicted_s: float | None
    """None where the machine's profile was not at hand."""
    measured_s: float


class PartFigures(Value):
    """Seconds of one part of a phase, summed over its tasks."""

    predicted_s: float | None
    """By the profile, for the work that was really done; None where the profile was not at hand."""
    measured_s: float


class ThreadFigures(Value):
    """Threads of a class of tasks."""

    planned: int
    cpu_s: float
    """Seconds that they ran on cores, since the engine was opened."""


class Waste(Value):
    """What a run had in vain, as shares."""

    padding: float
    """Of the tokens computed, those of no prompt and no completion."""
    idle_places: float
    """Of the places of blocks in every step, those without a row that computes: it has finished, and none has come in its place."""
    unused_kv: float
    """Of the room reserved for keys and values in every step, what holds none of a row that computes: completions grow into it."""


class RunReport(Value):
    """What a run did, beside what was predicted for it."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    plan: Plan
    predicted: Predicted
    measured: Predicted
    error: dict[str, float | None]
    """measured / predicted − 1 of every scalar field; None where nothing was predicted."""
    emulated: bool = False
    machine: Named
    resident_bytes: dict[Tier, int]
    """Weights held in memory for the whole run, per tier; ring buffers are not among them."""
    bytes_read: int
    """From disk, by this process, as the kernel counts them (/proc/self/io)."""
    prompts_computed: int
    tasks: dict[Kind, TaskFigures]
    phases: dict[Phase, dict[Part, PartFigures]] = Field(default_factory=dict)
    """Prefill and decode apart: reading weights, computing, and what computing consists of."""
    performed: Performed | None = None
    """The work behind `phases`: what `lmoffload calibrate` holds profiles against."""
    threads: dict[TaskClass, ThreadFigures] = Field(default_factory=dict)
    overlapped_s: float | None = None
    """Seconds in which at least two resources worked; None where it was not measured."""
    control_s: float | None = None
    """Working seconds of the thread that hands tasks to the resources."""
    waste: Waste | None = None
    peak_rss_bytes: int
    remarks: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)

    model_config = Value.model_config | {"populate_by_name": True, "serialize_by_alias": True}


def relative_errors(predicted: Predicted, measured: Predicted) -> dict[str, float | None]:
    """measured / predicted − 1 of every scalar field of both."""
    errors: dict[str, float | None] = {}
    for name, expected in predicted.model_dump().items():
        if isinstance(expected, int | float):
            got = getattr(measured, name)
            errors[name] = got / expected - 1 if expected else None
    return errors


def phase_figures(performed: Performed, machine: MachineProfile | None) -> dict[Phase, dict[Part, PartFigures]]:
    """Each part of each phase, predicted by a profile and measured.

    Raises:
        StatedError: the profile lacks a disk or a curve that the work needs.
    """
    found: dict[Phase, dict[Part, PartFigures]] = {}
    for phase in PHASES:
        measured = measured_s(performed, phase)
        predicted = {} if machine is None else Repriced(machine, performed).predicted_s(phase)
        found[phase] = {part: PartFigures(predicted_s=predicted.get(part), measured_s=seconds) for part, seconds in measured.items()}
    return found
