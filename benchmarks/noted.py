"""The program, with every prompt that it begins noted: python benchmarks/noted.py FILE ARGUMENT ...

FILE gets a prompt's id in a line of its own when it is given a place in a block. What was begun and has no result when a run is killed
is what is computed again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.cli.main import main
from lmoffload.environment import prepare_threads

if TYPE_CHECKING:
    from lmoffload.executor.row import Row


def note_into(file: Path) -> None:
    """From now on, note what this process begins."""
    prepare_threads()
    from lmoffload.executor.micro_batch import MicroBatch
    from lmoffload.executor.waiting import Waiting

    descriptor, take, put = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), Waiting.take, MicroBatch.put

    def note(rows: Iterable[Row]) -> None:
        os.write(descriptor, "".join(f"{row.request.id}\n" for row in rows).encode())

    def noted_take(waiting: Waiting) -> list[Row]:
        rows = take(waiting)
        note(rows)
        return rows

    def noted_put(batch: MicroBatch, place: int, row: Row) -> None:
        note([row])
        put(batch, place, row)

    Waiting.take, MicroBatch.put = noted_take, noted_put  # type: ignore[method-assign]


if __name__ == "__main__":
    note_into(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
