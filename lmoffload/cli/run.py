"""`lmoffload run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import (
    LIMITS,
    SAMPLING,
    WORK,
    Cores,
    Debug,
    DeviceMemory,
    DiskSpace,
    EmulateDevice,
    GenLen,
    HostMemory,
    Input,
    Machine,
    MicroBatch,
    Model,
    NumMicroBatches,
    NumPrompts,
    PromptLen,
    Quality,
    Threads,
    WeightsMemory,
)


def run(
    model: Model,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan made before; by default one is made now.")] = None,
    machine: Machine = None,
    quality: Quality = "exact",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the results here, as JSON lines, or in the end as a table (.csv, .parquet). Where a run of the same job has ended "
            "early, the next goes on with it.",
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Write the output file anew instead of going on with it.")] = False,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the prediction and the measurement here.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the first block's timelines here, predicted and measured; Perfetto opens it."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="One prompt: its completion is all that is printed.", rich_help_panel=WORK),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the TEXT of -p in the model's chat template.", rich_help_panel=WORK)] = False,
    input_file: Input = None,
    num_prompts: NumPrompts = None,
    prompt_len: PromptLen = None,
    gen_len: GenLen = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    emulate_device: EmulateDevice = None,
    disk_space: DiskSpace = None,
    weights_memory: WeightsMemory = None,
    threads: Threads = None,
    cores: Cores = None,
    nice: Annotated[
        int | None,
        typer.Option("--nice", metavar="N", help="Leave processors to others: 19 takes what nobody else wants.", rich_help_panel=LIMITS),
    ] = None,
    micro_batch: MicroBatch = None,
    num_micro_batches: NumMicroBatches = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="X",
            help="0 is greedy. What is not given follows the model's own generation configuration.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", metavar="X", help="Keep the likeliest tokens that together have this probability.", rich_help_panel=SAMPLING
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", help="Keep the N likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", metavar="X", help="Keep tokens at least X times as likely as the likeliest one.", rich_help_panel=SAMPLING
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty", metavar="X", help="Above 1, what is there already gets less likely.", rich_help_panel=SAMPLING
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of sampling and of synthetic prompts.", rich_help_panel=SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End a completion before this text; may be given again.", rich_help_panel=SAMPLING),
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Tell every token's log-probability in the results.", rich_help_panel=SAMPLING)
    ] = False,
    debug: Debug = False,
) -> None:
    """Complete prompts with a model, by the best plan for them. Without prompts, on a terminal: talk with it."""
    from lmoffload.api.asking import asked_of
    from lmoffload.api.limits import keep_to, limits_of
    from lmoffload.api.work import Work
    from lmoffload.api.workflow import RunOptions, run_work
    from lmoffload.environment import on_terminal
    from lmoffload.report.progress import ProgressBar

    work = Work(
        prompt=prompt, chat=chat, input_file=input_file, num_prompts=num_prompts, prompt_len=prompt_len, gen_len=gen_len,
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ()),
        min_p=min_p, repetition_penalty=repetition_penalty, log_probabilities=logprobs,
    )  # fmt: skip
    limits = limits_of(
        host_memory=host_memory,
        device_memory=device_memory,
        disk_space=disk_space,
        weights_memory=weights_memory,
        emulate_device=emulate_device,
        threads=threads,
        cores=cores if plan is None else None,  # a plan has its threads
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
    )
    if cores is not None:
        keep_to(cores)
    options = RunOptions(
        plan_file=plan, machine=machine, quality=asked_of(quality=quality).quality, output=output, restart=restart,
        report_file=report, trace_file=trace, nice=nice,
    )  # fmt: skip
    if work.is_nothing and options == RunOptions(machine=machine, quality=options.quality) and on_terminal():
        from lmoffload.api.chat import run_chat

        run_chat(model, work, limits, machine, options.quality)
        raise typer.Exit
    with ProgressBar() as bar:
        all_done = run_work(model, work, limits, options, bar)
    raise typer.Exit(0 if all_done else 1)
