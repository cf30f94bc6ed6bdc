"""The manifest of a job: what made the lines of its output file, so that a later run goes on with the same or refuses."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import Field

from lmoffload.documents import write_whole
from lmoffload.errors import StatedError
from lmoffload.jobs.job import Job, Options
from lmoffload_solver.plan import Named, Plan
from lmoffload_solver.value import Value, read_value

Setting = bool | float | int | str | tuple[str, ...] | None


class Manifest(Value):
    """Lies beside the output file; see `manifest_place`."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    lmoffload: str
    """The version that began it."""
    model: Named
    input: str
    """The file of the lines, or what synthetic prompts are like."""
    options: dict[str, Setting]
    """What was asked for all lines, by the names of the command's options."""
    lines_digest: str
    """Of every line as the engine gets it: tokens, options and errors."""
    num_lines: int
    seed: int
    """Of lines that have none: chosen when the job was begun, so that going on gives what one run would have given."""
    plan: Plan | None
    """The plan of the run that wrote last; None where no line can be run."""

    model_config = Value.model_config | {"populate_by_name": True, "serialize_by_alias": True}

    @staticmethod
    def of(model: Named, source: str, options: Options, job: Job) -> Manifest:
        """Of a job that begins, without a plan yet."""
        asked = asdict(options.sampling) | {
            "gen_len": options.gen_len, "stop": options.stop, "log_probabilities": options.log_probabilities,
        }  # fmt: skip
        return Manifest(
            lmoffload=version("lmoffload"),
            model=model,
            input=source,
            options=asked,
            lines_digest=_digest(job),
            num_lines=job.num_lines,
            seed=secrets.randbits(62),
            plan=None,
        )

    def require_same(self, begun: Manifest, output: Path) -> None:
        """
        Raises:
            StatedError: a job that was begun with `begun` is not this one.
        """
        differs = None
        if self.model.digest != begun.model.digest:
            differs = f"another model ({begun.model.name})" if self.model.name != begun.model.name else "other weights of the model"
        elif changed := _changed(self.options, begun.options):
            differs = f"{changed} {_told(begun.options.get(changed))} instead of {_told(self.options[changed])}"
        elif self.lines_digest != begun.lines_digest:
            differs = f"another input ({begun.num_lines} lines of {begun.input}, of which at least one is not as now)"
        if differs:
            raise StatedError(f"The job of {output} was begun with {differs}: name another output, or give --restart to begin anew.")

    def require_same_results(self, plan: Plan, output: Path) -> None:
        """
        Raises:
            StatedError: a plan computes in other formats or with other kernels than the one that made the lines that are there.
        """
        if self.plan is not None and results_of(plan) != results_of(self.plan):
            raise StatedError(
                f"The job of {output} was begun with a plan of other formats or kernels, whose results are not these to the last bit: "
                "give the quality and limits that it was begun with, or --restart to begin anew."
            )


def results_of(plan: Plan) -> tuple[object, ...]:
    """What of a plan decides the bits of its results; batches, threads and homes do not."""
    return plan.kernels, plan.kv.format, {name: tensor.format for name, tensor in plan.weights.tensors.items()}


def manifest_place(output: Path) -> Path:
    """Where the manifest of an output file lies."""
    return output.with_name(output.name + ".job")


def read_manifest(output: Path) -> Manifest | None:
    """The manifest of an output file; None where there is none.

    Raises:
        StatedError: it cannot be read.
    """
    place = manifest_place(output)
    return read_value(Manifest, place, "job manifest") if place.exists() else None


def write_manifest(output: Path, manifest: Manifest) -> None:
    """Write the manifest of an output file, whole or not at all.

    Raises:
        StatedError: it cannot be written.
    """
    write_whole(manifest_place(output), manifest.model_dump_json(indent=2) + "\n", "job manifest")


def _changed(mine: Mapping[str, Setting], theirs: Mapping[str, Setting]) -> str | None:
    return next((name for name in mine if mine[name] != theirs.get(name)), None)


def _told(setting: Setting) -> str:
    if isinstance(setting, bool):
        return "on" if setting else "off"
    if isinstance(setting, tuple):
        return " and ".join(map(repr, setting)) or "none"
    return "none" if setting is None else str(setting)


def _digest(job: Job) -> str:
    digest = hashlib.sha256()
    for request in job.requests:
        digest.update(json.dumps(asdict(request)).encode() + b"\n")
    for line in job.bad_lines:
        digest.update(json.dumps(asdict(line)).encode() + b"\n")
    return digest.hexdigest()
