"""What `plan` and `run` do from beginning to end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.api.asking import Asked
from lmoffload.api.machine import machine_of
from lmoffload.api.model import open_model
from lmoffload.api.planning import ModelPlan, NoPlanError, read_plan, require_room, solve_for
from lmoffload.api.resuming import begin, left_of, manifest_of, plan_again
from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.api.work import Work
from lmoffload.documents import check_place, require_distinct, write_whole
from lmoffload.errors import StatedError, UsageError
from lmoffload.report.plan import infeasible_document
from lmoffload.report.progress import BINDS, ProgressBar, RunProgress
from lmoffload.report.run import run_line, run_tables
from lmoffload.report.tables import show
from lmoffload.units import format_number, format_seconds
from lmoffload_solver.plan import Named
from lmoffload_solver.value import Quality, Value
from lmoffload_solver.workload import Limits

if TYPE_CHECKING:
    from lmoffload.executor import Progress as Step
    from lmoffload.jobs.job import Job
    from lmoffload.jobs.output import JobOutput
    from lmoffload.jobs.results import Result
    from lmoffload.jobs.text import Text
    from lmoffload.profiler.progress import Progress
    from lmoffload_solver.report import RunReport

MOST_NICE = 19


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Files of a run, and how it behaves among others."""

    plan_file: Path | None = None
    machine: str | None = None
    quality: Quality = "exact"
    output: Path | None = None
    restart: bool = False
    report_file: Path | None = None
    trace_file: Path | None = None
    nice: int | None = None


def plan_work(
    name: str,
    work: Work,
    limits: Limits,
    machine: str | None,
    *,
    asked: Asked | None = None,
    out: Path | None = None,
    as_json: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    tell: Tell = tell_on_stderr,
) -> ModelPlan:
    """The best plan for some work, written to `out`. Where none exists and `as_json` is true, the document that says so is printed first.

    Raises:
        NoPlanError: none exists.
        StatedError: the model, the work or the profile cannot be read.
    """
    work.check()
    if out is not None:
        check_place(out, "plan")
        require_distinct([("--out", out)], [("--input", work.input_file), ("--machine", None if machine is None else Path(machine))])
    model = open_model(name)
    asked = asked or Asked()
    workload = asked.of(work.workload(model))
    on = machine_of(machine, model.path, is_here=False, on_progress=on_progress, tell=tell)
    try:
        planned = solve_for(model, on, workload, limits, asked)
    except NoPlanError as error:
        if as_json:
            named = Named(name=model.shape.name, digest=model.digest)
            print(json.dumps(infeasible_document(error.outcome, named, error.machine, workload), indent=2))
        raise
    for remark in planned.plan.remarks:
        tell(remark)
    if out is not None:
        write_document(planned.plan, out, "plan")
    return planned


def run_work(name: str, work: Work, limits: Limits, options: RunOptions, bar: ProgressBar, tell: Tell = tell_on_stderr) -> bool:
    """Complete the work, or what is left of it where the output file has the beginning; returns False when some lines failed.

    Raises:
        NoPlanError: no plan exists; nothing was run.
        StatedError: something cannot be read or written, or the output is of another job; nothing was written unless results were
            finished before.
    """
    _check_run(work, limits, options)
    if options.nice is not None:
        os.nice(options.nice)
    if options.output is None:
        return _run_work(name, work, limits, options, None, bar, tell)
    from lmoffload.jobs.output import job_output

    with job_output(options.output, options.restart) as output:
        return _run_work(name, work, limits, options, output, bar, tell)


def _run_work(
    name: str, work: Work, limits: Limits, options: RunOptions, output: JobOutput | None, bar: ProgressBar, tell: Tell
) -> bool:
    model = open_model(name)
    checkpoint = model.require_checkpoint()
    for remark in checkpoint.remarks:
        tell(remark)
    machine = machine_of(options.machine, checkpoint.path, on_progress=bar.show_profiling, tell=tell)
    planned = None
    if options.plan_file is not None:
        planned = read_plan(options.plan_file, model, machine)
        require_room(options.plan_file, planned.plan, model.shape)
    if planned is not None and work.gen_len is None:
        work = replace(work, gen_len=planned.plan.workload.gen_len)
    bar.say("loading the tokenizer")
    from lmoffload.jobs.text import Text

    text = Text(checkpoint)
    job, begun = work.job(text, model.shape), None
    if output is not None:
        job, begun = left_of(job, manifest_of(model, work, job), output, tell)
        if not job.num_lines:
            return True
    if planned is None and begun is not None and job.requests:
        planned = plan_again(begun, model, machine, limits, options.quality)
    if planned is None and job.requests:
        planned = solve_for(model, machine, Asked(quality=options.quality).of(job.workload), limits)
        _tell_in_short(planned.plan.remarks, tell)
    if output is not None and begun is not None:
        begin(output, begun, job, None if planned is None else planned.plan)
    return _complete(work, options, planned, job, text, output, bar, tell)


def write_document(value: Value, path: Path, what: str) -> None:
    """Write a value as JSON, whole or not at all.

    Raises:
        StatedError: the file cannot be written.
    """
    write_whole(path, value.model_dump_json(indent=2) + "\n", what)


def _check_run(work: Work, limits: Limits, options: RunOptions) -> None:
    """Refuse what can be refused before anything is opened. Writes nothing."""
    from lmoffload.jobs.manifest import manifest_place
    from lmoffload.jobs.output import lines_place
    from lmoffload.jobs.tables import require_readable

    work.check()
    work.require_prompts()
    if options.plan_file is not None and (limits != Limits() or options.quality != "exact"):
        raise UsageError("The plan fixes memory, threads, batches and quality: give either --plan or these.")
    if work.prompt is not None and options.output is not None:
        raise UsageError("The completion of -p goes to standard output; --output belongs to --input and synthetic prompts.")
    if options.restart and options.output is None:
        raise UsageError("--restart belongs to --output.")
    require_readable(work.input_file, options.output)
    lines = None if options.output is None else lines_place(options.output)
    if options.output is not None:
        check_place(options.output, "output file")
    if options.nice is not None and not 0 <= options.nice <= MOST_NICE:
        raise UsageError(f"The number given for nice is {options.nice}; it must be at least 0 and at most {MOST_NICE}.")
    if options.report_file is not None:
        check_place(options.report_file, "report")
    if options.trace_file is not None:
        check_place(options.trace_file, "trace")
    require_distinct(
        [
            ("--output", options.output),
            *([] if lines == options.output else [("the lines of --output", lines)]),
            ("the manifest of --output", None if lines is None else manifest_place(lines)),
            ("--report", options.report_file),
            ("--trace", options.trace_file),
        ],
        [("--input", work.input_file), ("--plan", options.plan_file)],
    )


def _complete(
    work: Work,
    options: RunOptions,
    planned: ModelPlan | None,
    job: Job,
    text: Text,
    output: JobOutput | None,
    bar: ProgressBar,
    tell: Tell,
) -> bool:
    """Run the job and write its results; `planned` may be None where no line can be run."""
    from lmoffload.jobs.results import Result

    failed = 0

    def keep(result: Result) -> None:
        nonlocal failed
        failed += result.finish_reason == "error"
        if output is not None:
            output.write(result)
        elif work.prompt is None:
            sys.stdout.write(result.model_dump_json() + "\n")
            sys.stdout.flush()
        elif result.error is not None:
            raise StatedError(result.error)
        else:
            sys.stdout.write(result.completion + "\n")

    if planned is None or not job.requests:
        for line in job.bad_lines:
            keep(Result.of_bad_line(line))
    else:
        _tell_end(work, _run(planned, job, text, keep, output, bar, tell, options))
    if failed:
        tell(f"{failed} of {job.num_lines} lines failed; their results say why.")
    return not failed


def _run(
    planned: ModelPlan,
    job: Job,
    text: Text,
    keep: Callable[[Result], None],
    output: JobOutput | None,
    bar: ProgressBar,
    tell: Tell,
    options: RunOptions,
) -> RunReport:
    from lmoffload.api.engine import Engine
    from lmoffload.executor.pace import TokenSeconds
    from lmoffload.jobs.memory_watch import MemoryWatch
    from lmoffload.jobs.output import SYNC_EVERY_S

    watch = MemoryWatch(planned.plan.predicted.peak_bytes.get("host", 0))
    progress = RunProgress(bar)
    first: list[str] = []

    def after_step(step: Step) -> None:
        while first:  # not before: what cannot be run is told in one sentence
            tell(first.pop())
        progress.show(step)
        if output is not None:
            output.sync(0 if step.block_done else SYNC_EVERY_S)

    if output is not None:
        costs = TokenSeconds.of(planned.plan)
        seconds = format_seconds(sum(costs.seconds(request) for request in job.requests))
        binds = BINDS.get(planned.plan.binding)
        first.append(f"Planned: {format_number(len(job.requests), 'prompt')} in {seconds} at most; {binds} binds.")
    bar.say("loading the weights")
    with Engine(planned, text=text, tell=tell, on_store=bar.show_store(), keep_spans=options.trace_file is not None) as engine:
        engine.run(job, keep, after_step, watch.short)
        report = engine.report()
        if options.trace_file is not None:
            write_whole(options.trace_file, json.dumps(engine.trace(job.workload)) + "\n", "trace")
    if options.report_file is not None:
        write_document(report, options.report_file, "report")
    return report


def _tell_end(work: Work, report: RunReport) -> None:
    if work.prompt is not None:
        print(f"lmoffload: {run_line(report)}", file=sys.stderr)
    else:
        show(run_tables(report), to_stderr=True)


def _tell_in_short(remarks: Sequence[str], tell: Tell) -> None:
    """`plan` tells all of them; a run has other things to say."""
    if remarks:
        more = f" (and {len(remarks) - 1} more, see `lmoffload plan`)" if len(remarks) > 1 else ""
        tell(remarks[0] + more)
