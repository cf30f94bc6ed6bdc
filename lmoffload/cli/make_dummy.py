"""`lmoffload make-dummy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmoffload.cli.options import Debug


def make_dummy(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="The shape's name, such as shape:llama-1.1b.", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to make.", show_default=False)],
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", help="Only the first N layers.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the random weights.")] = 0,
    debug: Debug = False,
) -> None:
    """Make a checkpoint of a shape with random weights, tokenizer included."""
    from lmoffload.api.model import SHAPE_PREFIX
    from lmoffload.checkpoint import make_dummy as make

    make(shape.removeprefix(SHAPE_PREFIX), directory, layers=layers, seed=seed)
    typer.echo(f"Made {directory}.")
