"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


class Invocation:
    """What holds for one call of the program."""

    def __init__(self) -> None:
        self.debug = False


def _set_debug(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.find_root().obj.debug = True


WORK, LIMITS, SAMPLING = "Work", "Limits", "Sampling"

Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show the full trace of an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder in Hugging Face layout, a .gguf file, or a hub id (owner/name).", show_default=False),
]
PlannedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder in Hugging Face layout, a .gguf file, a hub id (owner/name), or shape:NAME, which needs no weights.",
        show_default=False,
    ),
]
Machine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="FILE|NAME",
        help="A machine's profile: a file, or the name of one that comes with lmoffload, such as xeon-avx512-2-cores. "
        "This machine's own by default.",
    ),
]
Input = Annotated[
    Path | None,
    typer.Option("--input", metavar="FILE", help="Prompts as JSON lines, or a table (.csv, .parquet).", rich_help_panel=WORK),
]
NumPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", metavar="N", help="Number of synthetic prompts; 16 by default.", rich_help_panel=WORK),
]
PromptLen = Annotated[
    int | None,
    typer.Option("--prompt-len", metavar="N", help="Tokens of each synthetic prompt; 256 by default.", rich_help_panel=WORK),
]
GenLen = Annotated[
    int | None,
    typer.Option("--gen-len", metavar="N", help="Tokens to generate for each prompt at most; 64 by default.", rich_help_panel=WORK),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Memory of the whole process, such as 4GiB or 500MB; an emulated device's comes on top.",
        rich_help_panel=LIMITS,
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option("--device-memory", metavar="SIZE", help="Memory of the device that may be used.", rich_help_panel=LIMITS),
]
EmulateDevice = Annotated[
    list[str] | None,
    typer.Option(
        "--emulate-device",
        metavar="MEMORY@RATE",
        help="Emulate a device with so much memory behind a link of that rate each way, such as 512MiB@2GB/s; again for one more like it.",
        rich_help_panel=LIMITS,
    ),
]
DiskSpace = Annotated[
    str | None,
    typer.Option("--disk-space", metavar="SIZE", help="Disk space for keys, values and (with a device) weights.", rich_help_panel=LIMITS),
]
Goal = Annotated[
    str,
    typer.Option(
        "--goal",
        metavar="throughput|latency|deadline",
        help="The most tokens per second, the quickest single completion, or the best quality that is done in time.",
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option("--deadline", metavar="DURATION", help="Time in which the work must be done, such as 90m; sets the goal."),
]
Quality = Annotated[
    str,
    typer.Option("--quality", metavar="exact|int8|int4|any", help="What may be lost: weights and KV cache in so many bits or more."),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="optimal|accelerate|zero-inference|flexgen",
        help="Another system's own choice, priced as that system would run it.",
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy-file", metavar="FILE", help="A FlexGen policy (JSON) to price, without its search."),
]
WeightsMemory = Annotated[
    str | None,
    typer.Option(
        "--weights-memory",
        metavar="SIZE|PERCENT%",
        help="Memory of weights, their buffers included: a size, or a share of the model's weights such as 40%.",
        rich_help_panel=LIMITS,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Fix the number of compute threads.", rich_help_panel=LIMITS),
]
Cores = Annotated[
    str | None,
    typer.Option("--cores", metavar="LIST", help="Processors that may be used, such as 0-1,4.", rich_help_panel=LIMITS),
]
MicroBatch = Annotated[
    int | None,
    typer.Option("--micro-batch", metavar="N", help="Fix the number of prompts computed at once.", rich_help_panel=LIMITS),
]
NumMicroBatches = Annotated[
    int | None,
    typer.Option("--num-micro-batches", metavar="N", help="Fix the number of micro-batches that share one load.", rich_help_panel=LIMITS),
]
