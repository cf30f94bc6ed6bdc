"""A comparison, readable: in the terminal, as Markdown, and in the folder of `--out`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType

from lmoffload.documents import write_whole
from lmoffload.errors import StatedError
from lmoffload.report.comparison_page import page_of
from lmoffload.report.comparison_tables import WordTable, facts_of, tables_of
from lmoffload.report.tables import facts, grid
from lmoffload_solver.comparison import Comparison

NAME = "comparison"


def comparison_tables(comparison: Comparison) -> Iterator[RenderableType]:
    """What was found; the systems' versions and the machine stand in the documents."""
    for table in tables_of(comparison):
        if table.title != "Systems":
            yield grid(table.title, table.columns, table.rows)
            if table.note:
                yield table.note
    yield facts("How", facts_of(comparison))
    yield from (f"[yellow]{remark}[/yellow]" for remark in comparison.remarks)


def markdown_of(comparison: Comparison) -> str:
    """The same as Markdown."""
    parts = [f"# {comparison.model.name}: systems compared", *comparison.remarks]
    parts += [_markdown(table) for table in tables_of(comparison)]
    parts.append("## How\n\n" + "\n".join(f"* {name}: {_cell(value)}" for name, value in facts_of(comparison)))
    return "\n\n".join(parts) + "\n"


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """The page, the Markdown and the JSON document in a folder, which is made where it is not there.

    Raises:
        StatedError: it cannot be written to.
    """
    require_folder(folder)
    write_whole(folder / f"{NAME}.json", comparison.model_dump_json(indent=2) + "\n", "document")
    write_whole(folder / f"{NAME}.md", markdown_of(comparison), "document")
    write_whole(folder / f"{NAME}.html", page_of(comparison), "page")


def require_folder(folder: Path) -> None:
    """Make a folder where it is not there.

    Raises:
        StatedError: it cannot be made, or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StatedError(f"The folder {folder} cannot be made: {error.strerror or error}.") from error
    if not os.access(folder, os.W_OK):
        raise StatedError(f"The folder {folder} cannot be written to.")


def _markdown(table: WordTable) -> str:
    lines = [f"## {table.title}", "", _line(table.columns), _line(["---", *["---:"] * (len(table.columns) - 1)])]
    lines += [_line(map(_cell, row)) for row in table.rows]
    return "\n".join(lines + (["", table.note] if table.note else []))


def _line(cells: Iterator[str] | list[str] | tuple[str, ...] | map[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Text that stays within its cell."""
    return " ".join(text.split()).replace("|", "\\|")
