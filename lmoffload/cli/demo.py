"""`lmoffload demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from lmoffload.cli.options import Debug


def demo(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A chat model; SmolLM2-135M from its wheel by default.")] = None,
    debug: Debug = False,
) -> None:
    """Show the whole story on a real small model: profile, plan, run, predicted beside measured."""
    from lmoffload.api.demo import run_demo

    run_demo(model)
