"""`lmoffload profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import AsJson, Debug


def profile(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer measurements: within 60 s instead of within 5 minutes.")] = False,
    disk: Annotated[
        Path | None, typer.Option("--disk", metavar="PATH", help="Measure the disk that holds PATH; the current folder's by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the profile here, not to your data directory (on Linux ~/.local/share/lmoffload)."
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, and keep the result where later commands find it."""
    from lmoffload.api.machine import profile as measure
    from lmoffload.report.profile import profile_tables
    from lmoffload.report.progress import ProgressBar
    from lmoffload.report.tables import show

    with ProgressBar() as bar:
        measured = measure(quick=quick, disk=disk, out=out, on_progress=bar.show_profiling)
    if as_json:
        typer.echo(measured.model_dump_json(indent=2))
    else:
        show(profile_tables(measured))
