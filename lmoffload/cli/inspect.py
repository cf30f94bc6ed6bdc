"""`lmoffload inspect`."""

from __future__ import annotations

import typer

from lmoffload.cli.options import AsJson, Debug, PlannedModel


def inspect(model: PlannedModel, as_json: AsJson = False, debug: Debug = False) -> None:
    """Say what a model is, and what is missing or odd in its files."""
    from lmoffload.api.model import open_model
    from lmoffload.checkpoint import inspect as look
    from lmoffload.report.inspect import inspect_tables
    from lmoffload.report.tables import show

    opened = open_model(model)
    document = look(opened.checkpoint or opened.shape)
    if as_json:
        typer.echo(document.model_dump_json(indent=2))
    else:
        show(inspect_tables(document))
