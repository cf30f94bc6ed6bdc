"""CSV and Parquet files, read and written by a process of their own: what that loads never counts as memory of a run.

    python -m lmoffload.jobs.table_file read FILE
    python -m lmoffload.jobs.table_file write LINES FILE NAME < ids

`read` prints every row as a job's line; `write` makes a table of results from their lines, in the order of the ids, and NAME says of which
kind. What is wrong with a file is told in one sentence on standard error, with exit code 1.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

from lmoffload.errors import StatedError, sentence_of

Row = dict[str, Any]

LISTS = ("messages", "stop", "token_ids", "log_probabilities")
"""Cells of a CSV file that hold lists, as JSON."""

ROWS_AT_ONCE = 1000
"""Of a Parquet file: a group of rows, read and written together."""


def is_parquet(file: Path) -> bool:
    """By its name."""
    return file.suffix.lower() == ".parquet"


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of a table, without the cells that are empty.

    Raises:
        StatedError: the file is none, or its columns cannot be those of prompts.
    """
    return _rows_of_parquet(file) if is_parquet(file) else _rows_of_csv(file)


def write_rows(file: IO[bytes], rows: Iterable[Row], columns: Sequence[str], parquet: bool) -> None:
    """Write a table of results; a row may lack the last columns."""
    if parquet:
        _write_parquet(file, rows, columns)
    else:
        _write_csv(file, rows, columns)


def results_in_order(lines: Path, ids: Sequence[str]) -> tuple[tuple[str, ...], Iterator[Row]]:
    """The columns and the rows of the results in a file of lines. Its lines are found again one by one, so that it may be large."""
    columns: dict[str, None] = {}
    place: dict[str, int] = {}
    with lines.open("rb") as file:
        at = 0
        for line in file:
            result = json.loads(line)
            columns |= dict.fromkeys(result)
            place[result["id"]], at = at, at + len(line)

    def rows() -> Iterator[Row]:
        with lines.open("rb") as file:
            for line_id in ids:
                file.seek(place[line_id])
                yield json.loads(file.readline())

    return tuple(columns), rows()


def _rows_of_csv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            cells = csv.reader(text, strict=True)
            columns = next(cells, [])
            _check_columns(file, columns)
            for number, row in enumerate(filter(None, cells), 1):
                if len(row) != len(columns):
                    raise StatedError(f"Row {number} of the table {file} has {len(row)} cells, and its header {len(columns)}.")
                yield {name: _cell(name, text) for name, text in zip(columns, row, strict=True) if text}
    except (csv.Error, UnicodeDecodeError) as error:
        reason = error if isinstance(error, csv.Error) else "it is not UTF-8 text"
        raise StatedError(f"The table {file} cannot be read: {reason}.") from error


def _rows_of_parquet(file: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(file) as table:
            columns = [name for name in table.schema_arrow.names if not name.startswith("__index_level_")]  # pandas' numbers of rows
            _check_columns(file, columns)
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    plain: Row = _plain(row)
                    if isinstance(plain.get("id"), int):
                        plain["id"] = str(plain["id"])
                    yield plain
    except ArrowException as error:
        raise StatedError(f"The table {file} cannot be read: {str(error).splitlines()[0].rstrip('.')}.") from error


def _check_columns(file: Path, columns: Sequence[str]) -> None:
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise StatedError(f"The table {file} has two columns {twice!r}.")
    if not {"prompt", "messages"} & set(columns):
        raise StatedError(f"The table {file} has no column named prompt or messages; its columns are {', '.join(columns) or 'none'}.")


def _cell(name: str, text: str) -> Any:
    if name in LISTS and text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _plain(value: Any) -> Any:
    """Without what is not there: fields of a structure that are null, since all rows have the same ones, and numbers that are none."""
    if isinstance(value, dict):
        return {name: _plain(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and value != value else value


def _write_csv(file: IO[bytes], rows: Iterable[Row], columns: Sequence[str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    text.write(",".join(map(_quoted, columns)) + "\n")
    for row in rows:
        text.write(",".join(_quoted(row.get(name)) for name in columns) + "\n")
    text.flush()
    text.detach()


def _quoted(value: Any) -> str:
    """A cell. Python 3.10's own writer refuses a NUL, which a model may well say."""
    cell = "" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
    quoted = cell.replace('"', '""')
    return f'"{quoted}"' if set(cell) & set(',"\r\n') else cell


def _write_parquet(file: IO[bytes], rows: Iterable[Row], columns: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = {
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "prompt_tokens": pyarrow.int32(),
        "log_probabilities": pyarrow.list_(pyarrow.float64()),
    }
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in columns])
    with parquet.ParquetWriter(file, schema) as writer:
        left = iter(rows)
        while some := list(islice(left, ROWS_AT_ONCE)):
            writer.write_table(pyarrow.Table.from_pylist(some, schema=schema))


def _refuse(value: object) -> NoReturn:
    raise StatedError(f"A cell of the table holds a {type(value).__name__}, where only texts, numbers and lists of them have a meaning.")


def main(arguments: Sequence[str]) -> int:
    """The command."""
    try:
        if arguments[0] == "read":
            for row in rows_of(Path(arguments[1])):
                sys.stdout.buffer.write(json.dumps(row, default=_refuse).encode() + b"\n")
        else:
            columns, rows = results_in_order(Path(arguments[1]), json.load(sys.stdin))
            with open(arguments[2], "wb") as file:
                write_rows(file, rows, columns, is_parquet(Path(arguments[3])))
    except (StatedError, OSError, MemoryError) as error:
        print(sentence_of(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
