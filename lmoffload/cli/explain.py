"""`lmoffload explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import AsJson, Debug


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, from `plan --out`.", show_default=False)],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say where a plan's time goes and what binds."""
