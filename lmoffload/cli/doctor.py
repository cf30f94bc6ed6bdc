"""`lmoffload doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from lmoffload.cli.options import AsJson, Debug


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model, to look at the disk on which it lies too.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what was found on this machine (limits, disks, versions, profile), and what to change."""
    from lmoffload.api.doctor import examine
    from lmoffload.report.doctor import doctor_tables
    from lmoffload.report.tables import show

    found = examine(model)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        show(doctor_tables(found))
