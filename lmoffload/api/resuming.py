"""Going on with a job where a run before ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmoffload.api.machine import Machine
from lmoffload.api.model import Model
from lmoffload.api.planning import ModelPlan, has_room
from lmoffload.api.telling import Tell
from lmoffload.api.work import Work
from lmoffload_solver.plan import Named, Plan
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits

if TYPE_CHECKING:
    from lmoffload.jobs.job import Job
    from lmoffload.jobs.manifest import Manifest
    from lmoffload.jobs.output import JobOutput


def manifest_of(model: Model, work: Work, job: Job) -> Manifest:
    """The manifest of a job that begins."""
    from lmoffload.jobs.manifest import Manifest

    return Manifest.of(Named(name=model.shape.name, digest=model.digest, place=model.place), work.source, work.options, job)


def left_of(job: Job, manifest: Manifest, output: JobOutput, tell: Tell) -> tuple[Job, Manifest]:
    """The lines that are still to be computed, and the manifest that holds for them: that of the run that began, if there was one.

    Raises:
        StatedError: the output file is of another job.
    """
    output.ids = job.ids
    if output.begun is not None:
        manifest.require_same(output.begun, output.path)
        manifest, done = output.begun, len(output.finished)
        tell(
            f"Going on with {output.path}: {done} of {manifest.num_lines} lines are finished."
            if done < manifest.num_lines
            else f"All {done} lines of {output.path} are finished already."
        )
    return job.rest(output.finished, manifest.seed), manifest


def plan_again(begun: Manifest, model: Model, machine: Machine, limits: Limits, quality: Quality) -> ModelPlan | None:
    """The plan that the job was begun with, where the same is asked for and it still fits; None elsewhere."""
    plan = begun.plan
    if plan is None or (plan.limits, plan.quality, plan.machine.digest) != (limits, quality, machine.profile.fingerprint()):
        return None
    return ModelPlan(plan, model, machine.profile) if has_room(plan, model.shape) else None


def begin(output: JobOutput, manifest: Manifest, job: Job, plan: Plan | None) -> None:
    """Make the output file ready for the results of what is left.

    Raises:
        StatedError: the plan would give other results than those that are there, or the disk has no room.
    """
    if plan is not None:
        manifest.require_same_results(plan, output.path)
        manifest = manifest.model_copy(update={"plan": plan})
    output.begin(manifest, sum(request.max_new_tokens for request in job.requests))
