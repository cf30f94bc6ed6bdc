"""`lmoffload calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import AsJson, Debug


def calibrate(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="Reports, from `run --report`.", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Fold what runs measured into this machine's profile, and show which curves were off. The old profile is kept beside it."""
    from lmoffload.api.calibrating import calibrate_profile
    from lmoffload.report.calibration import calibration_tables
    from lmoffload.report.tables import show

    found = calibrate_profile(reports, dry_run=dry_run)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        show(calibration_tables(found.corrections, found.profile, found.backup, found.known))
