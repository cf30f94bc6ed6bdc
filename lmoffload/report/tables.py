"""The common look of tables."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 140
"""Width where the output is no terminal: wide enough that no table is broken."""


def show(renderables: Iterable[RenderableType], *, to_stderr: bool = False) -> None:
    """Print tables to standard output, or to standard error where that holds results."""
    stream = sys.stderr if to_stderr else sys.stdout
    text = None if stream.isatty() else io.StringIO()
    console = Console(file=text or stream, highlight=False, width=None if text is None else PLAIN_WIDTH)
    for renderable in renderables:
        console.print(renderable)
    if text is not None:  # rich fills every line up with spaces
        stream.writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def facts(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    """A table of two columns: what, and how much."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return _titled(title, table)


def grid(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> RenderableType:
    """A table whose first column names and whose others hold figures."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return _titled(title, table)


def _titled(title: str, table: Table) -> RenderableType:
    """A title of the table's own would be broken at the table's width."""
    return Group(Text(title, style="italic"), table)
