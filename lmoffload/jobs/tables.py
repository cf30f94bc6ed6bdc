"""Tables, which are CSV and Parquet files: prompts from their rows, and results as their rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lmoffload.documents import whole_file
from lmoffload.errors import StatedError
from lmoffload.jobs.table_file import is_parquet


def is_table(file: Path) -> bool:
    """By its name: a file of any other is one of JSON lines."""
    return file.suffix.lower() == ".csv" or is_parquet(file)


def require_readable(*files: Path | None) -> None:
    """Raises:
    StatedError: a file is of a kind that needs a library which is not installed.
    """
    for file in files:
        if file is not None and is_parquet(file) and find_spec("pyarrow") is None:
            raise StatedError(f"{file} is a Parquet file, which needs pyarrow: pip install 'lmoffload[tables]', or use CSV or JSON lines.")


def lines_of_table(file: Path) -> bytes:
    """The rows of a table as the lines of a job.

    Raises:
        StatedError: the file cannot be read.
    """
    require_readable(file)
    return _in_a_process("read", str(file))


def write_table(table: Path, lines: Path, ids: Sequence[str]) -> None:
    """Write a table of the results in a file of lines, whole or not at all, in the order of the ids.

    Raises:
        StatedError: it cannot be written.
    """
    with whole_file(table, "table") as part:
        _in_a_process("write", str(lines), str(part), table.name, told=json.dumps(ids).encode())


def _in_a_process(*arguments: str, told: bytes = b"") -> bytes:
    """What `table_file` prints.

    Raises:
        StatedError: it says what is wrong.
    """
    command = [sys.executable, "-m", "lmoffload.jobs.table_file", *arguments]
    done = subprocess.run(command, input=told, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise StatedError(last[0] if last else f"The table {arguments[1]} cannot be used: its process ended with {done.returncode}.")
    return done.stdout
