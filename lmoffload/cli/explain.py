"""`lmoffload explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import AsJson, Debug


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, from `plan --out`.", show_default=False)],
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Where the model lies, if it has moved.")] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="FILE|NAME", help="The profile that the plan was made from, if it has moved.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say where a plan's time goes and what binds."""
    from lmoffload.api.explaining import explain_file
    from lmoffload.report.explain import explain_tables
    from lmoffload.report.tables import show

    read, explanation = explain_file(plan, model, machine)
    if as_json:
        typer.echo(explanation.model_dump_json(indent=2))
    else:
        show(explain_tables(read, explanation))
