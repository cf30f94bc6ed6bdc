"""`lmoffload plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import (
    LIMITS,
    AsJson,
    Cores,
    Deadline,
    Debug,
    DeviceMemory,
    DiskSpace,
    EmulateDevice,
    GenLen,
    Goal,
    HostMemory,
    Input,
    Machine,
    MicroBatch,
    NumMicroBatches,
    NumPrompts,
    PlannedModel,
    Policy,
    PolicyFile,
    PromptLen,
    Quality,
    Threads,
    WeightsMemory,
)


def plan(
    model: PlannedModel,
    machine: Machine = None,
    input_file: Input = None,
    num_prompts: NumPrompts = None,
    prompt_len: PromptLen = None,
    gen_len: GenLen = None,
    goal: Goal = "throughput",
    deadline: Deadline = None,
    quality: Quality = "exact",
    policy: Policy = "optimal",
    policy_file: PolicyFile = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    emulate_device: EmulateDevice = None,
    disk_space: DiskSpace = None,
    weights_memory: WeightsMemory = None,
    threads: Threads = None,
    cores: Cores = None,
    micro_batch: MicroBatch = None,
    num_micro_batches: NumMicroBatches = None,
    solve_time: Annotated[
        str | None, typer.Option("--solve-time", metavar="DURATION", help="Time limit of the search.", rich_help_panel=LIMITS)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan here, for `run --plan`.")] = None,
    out_plot: Annotated[
        Path | None, typer.Option("--out-plot", metavar="FILE", help="Draw the plan's roofline, and throughput against batch and memory.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Solve for the best plan for some work with a model."""
    from lmoffload.api.asking import asked_of
    from lmoffload.api.limits import limits_of
    from lmoffload.api.work import Work
    from lmoffload.api.workflow import plan_work
    from lmoffload.report.plan import plan_tables
    from lmoffload.report.progress import ProgressBar
    from lmoffload.report.tables import show

    work = Work(input_file=input_file, num_prompts=num_prompts, prompt_len=prompt_len, gen_len=gen_len)
    limits = limits_of(
        host_memory=host_memory,
        device_memory=device_memory,
        disk_space=disk_space,
        emulate_device=emulate_device,
        weights_memory=weights_memory,
        threads=threads,
        cores=cores,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        solve_time=solve_time,
    )
    asked = asked_of(goal=goal, deadline=deadline, quality=quality, policy=policy, policy_file=policy_file)
    with ProgressBar() as bar:
        planned = plan_work(model, work, limits, machine, asked=asked, out=out, as_json=as_json, on_progress=bar.show_profiling)
    if out_plot is not None:
        from lmoffload.api.plotting import plot_plan

        plot_plan(planned, out_plot)
    if as_json:
        typer.echo(planned.plan.model_dump_json(indent=2))
    else:
        show(plan_tables(planned.plan))
