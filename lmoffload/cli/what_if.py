"""`lmoffload what-if`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import AsJson, Debug


def what_if(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, from `plan --out`.", show_default=False)],
    host_memory: Annotated[str | None, typer.Option("--host-memory", metavar="+SIZE", help="More host memory, such as +8GiB.")] = None,
    device_memory: Annotated[str | None, typer.Option("--device-memory", metavar="+SIZE", help="More memory of the device.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", metavar="FACTOR", help="A faster disk, such as 2x.")] = None,
    link: Annotated[str | None, typer.Option("--link", metavar="FACTOR", help="A faster link to the device.")] = None,
    cores: Annotated[str | None, typer.Option("--cores", metavar="FACTOR", help="More cores, taken as that much faster.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Where the model lies, if it has moved.")] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="FILE|NAME", help="The profile that the plan was made from, if it has moved.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what more of the machine would give, solved again."""
    from lmoffload.api.asking_what_if import ask, changes_of
    from lmoffload.report.tables import show
    from lmoffload.report.what_if import what_if_tables

    changes = changes_of(host_memory=host_memory, device_memory=device_memory, disk=disk, link=link, cores=cores)
    answered = ask(plan, changes, model, machine)
    if as_json:
        typer.echo(answered.model_dump_json(indent=2))
    else:
        show(what_if_tables(answered))
