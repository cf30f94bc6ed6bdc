"""`lmoffload quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import AsJson, Debug, HostMemory, Machine, MicroBatch, Model, NumMicroBatches, Threads, WeightsMemory


def quality(
    model: Model,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to measure on; one that comes with lmoffload by default.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of the text to take at most.")] = 2048,
    machine: Machine = None,
    host_memory: HostMemory = None,
    weights_memory: WeightsMemory = None,
    threads: Threads = None,
    micro_batch: MicroBatch = None,
    num_micro_batches: NumMicroBatches = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure what each format of weights, and of keys and values, costs a model in quality, and keep it for later plans."""
    from lmoffload.api.limits import limits_of
    from lmoffload.api.quality import measure_losses
    from lmoffload.report.progress import ProgressBar
    from lmoffload.report.quality import quality_tables
    from lmoffload.report.tables import show

    limits = limits_of(
        host_memory=host_memory,
        weights_memory=weights_memory,
        threads=threads,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
    )
    with ProgressBar() as bar:
        table = measure_losses(model, text_file=text, tokens=tokens, limits=limits, machine=machine, bar=bar)
    if as_json:
        typer.echo(table.model_dump_json(indent=2))
    else:
        show(quality_tables(table))
