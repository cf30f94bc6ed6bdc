"""RunReport: what happened, in the same quantities as the prediction. Field names are the contract of `run --report`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmoffload_solver.plan import Named, Plan, Predicted
from lmoffload_solver.value import Kind, Tier, Value


class TaskFigures(Value):
    """Tasks of one kind: how many, and their seconds, summed."""

    count: int
    predicted_s: float | None
    """None where the machine's profile was not at hand."""
    measured_s: float


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
