"""The common look of tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table

PLAIN_WIDTH = 140
"""Width where the output is no terminal: wide enough that no table is broken."""


def show(renderables: Iterable[RenderableType], *, to_stderr: bool = False) -> None:
    """Print tables to standard output, or to standard error where that holds results."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)
    for renderable in renderables:
        console.print(renderable)


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of two columns: what, and how much."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table whose first column names and whose others hold figures."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
