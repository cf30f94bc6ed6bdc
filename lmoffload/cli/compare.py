"""`lmoffload compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import (
    LIMITS,
    WORK,
    AsJson,
    Cores,
    Debug,
    EmulateDevice,
    GenLen,
    Input,
    Machine,
    MicroBatch,
    Model,
    NumMicroBatches,
    NumPrompts,
    PromptLen,
    Quality,
    Threads,
)


def compare(
    model: Model,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="PEER,...",
            help="accelerate, zero-inference, llama.cpp, airllm, flexgen-policy, accelerate-policy, zero-policy.",
        ),
    ] = "accelerate,zero-inference,llama.cpp,airllm",
    input_file: Input = None,
    num_prompts: NumPrompts = None,
    prompt_len: PromptLen = None,
    gen_len: GenLen = None,
    cut_gen_len: Annotated[
        int | None,
        typer.Option("--cut-gen-len", metavar="K", help="Generate K tokens and project the time of the rest.", rich_help_panel=WORK),
    ] = None,
    check_projection: Annotated[
        bool,
        typer.Option("--check-projection", help="Generate all, and hold the projection of K tokens against it.", rich_help_panel=WORK),
    ] = False,
    quality: Quality = "exact",
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Memory of every system's process, page cache included, as the kernel enforces it.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    disk_rate: Annotated[
        str | None,
        typer.Option("--disk-rate", metavar="SIZE", help="Bytes read from disk per second, such as 500MB.", rich_help_panel=LIMITS),
    ] = None,
    cores: Cores = None,
    peer_memory: Annotated[
        list[str] | None,
        typer.Option("--peer-memory", metavar="PEER=SIZE", help="Give one peer another memory limit.", rich_help_panel=LIMITS),
    ] = None,
    emulate_device: EmulateDevice = None,
    threads: Threads = None,
    micro_batch: MicroBatch = None,
    num_micro_batches: NumMicroBatches = None,
    machine: Machine = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option("--peer-python", metavar="[PEER=]FILE", help="The Python that has the peers, or one peer; this one by default."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="How often each system is run, in turn.")] = 3,
    sweep: Annotated[bool, typer.Option("--sweep/--no-sweep", help="Search each peer's best settings first.")] = True,
    warm: Annotated[
        bool, typer.Option("--warm", help="Every process does the work twice, and the second time counts.")
    ] = False,
    keep_cache: Annotated[
        bool, typer.Option("--keep-cache", help="Leave the page cache as it is: quicker, and unfair to whoever comes first.")
    ] = False,
    timeout: Annotated[str, typer.Option("--timeout", metavar="DURATION", help="Time limit of one run.")] = "1h",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write comparison.html, comparison.md and comparison.json here.")
    ] = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="table|flexllmgen", help="Tables, or FlexLLMGen's five-line summary of each system.")
    ] = "table",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run this engine and other systems on the same work, under the same limits, and compare them."""
    from lmoffload.api.asking import asked_of
    from lmoffload.api.comparing import CompareOptions, compare
    from lmoffload.api.limits import limits_of
    from lmoffload.api.work import Work
    from lmoffload.errors import UsageError
    from lmoffload.report.comparison import comparison_tables, require_folder, write_comparison
    from lmoffload.report.flexllmgen import summaries
    from lmoffload.report.progress import ProgressBar
    from lmoffload.report.tables import show

    if output_format not in ("table", "flexllmgen"):
        raise UsageError(f"The format {output_format!r} is not known; choose one of table, flexllmgen.")
    if out is not None:
        require_folder(out)
    work = Work(input_file=input_file, num_prompts=num_prompts, prompt_len=prompt_len, gen_len=gen_len)
    limits = limits_of(emulate_device=emulate_device, threads=threads, micro_batch=micro_batch, num_micro_batches=num_micro_batches)
    options = CompareOptions(
        against=against, quality=asked_of(quality=quality).quality, host_memory=host_memory, disk_rate=disk_rate, cores=cores,
        peer_python=tuple(peer_python or ()), peer_memory=tuple(peer_memory or ()), rounds=rounds, sweep=sweep, cut=cut_gen_len,
        check_projection=check_projection, warm=warm, keep_cache=keep_cache,
        timeout=timeout, machine=machine, command=("lmoffload", *sys.argv[1:]),
    )  # fmt: skip
    with ProgressBar() as bar:
        found = compare(model, work, limits, options, on_progress=bar.show_profiling)
    if out is not None:
        write_comparison(found, out)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    elif output_format == "flexllmgen":
        typer.echo(summaries(found))
    else:
        show(comparison_tables(found))
