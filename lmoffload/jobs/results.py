"""Results of a job: one JSON line per prompt, written as each finishes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from lmoffload.errors import StatedError
from lmoffload.executor.request import Completion
from lmoffload.jobs.lines import BadLine
from lmoffload_solver.value import Value


class Result(Value):
    """What came of one prompt: the line of the output file. `token_ids` leaves the end token out."""

    id: str
    completion: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: Literal["stop", "length", "error"]
    error: str | None = None

    @staticmethod
    def of_completion(completion: Completion, text: str) -> Result:
        """`text` is the completion decoded, and cut at its stop string."""
        return Result(
            id=completion.id,
            completion=text,
            token_ids=completion.token_ids,
            prompt_tokens=completion.prompt_tokens,
            finish_reason=completion.finish_reason,
            error=completion.error,
        )

    @staticmethod
    def of_bad_line(line: BadLine) -> Result:
        return Result(id=line.id, completion="", token_ids=(), prompt_tokens=0, finish_reason="error", error=line.error)


def check_output(path: Path, restart: bool) -> None:
    """Refuse a place that results cannot be written to, before anything is computed. Writes nothing.

    Raises:
        StatedError: the file exists and `restart` is false, or its folder does not exist.
    """
    if path.is_dir():
        raise StatedError(f"The output {path} is a folder; name a file.")
    if not path.absolute().parent.is_dir():
        raise StatedError(f"The folder of the output file {path} does not exist.")
    if path.exists() and not restart:
        raise StatedError(f"The output file {path} exists already; name another, or give --restart to write it anew.")


class ResultWriter:
    """Writes results to a file, or to standard output where `path` is None; each line is there as soon as it is written. A context manager."""

    def __init__(self, path: Path | None, restart: bool = False) -> None:
        """
        Raises:
            StatedError: see `check_output`.
        """
        self._path = path
        self._file: IO[str] = sys.stdout
        if path is not None:
            check_output(path, restart)
            try:
                self._file = path.open("w" if restart else "x", encoding="utf-8", newline="\n")
            except OSError as error:
                raise StatedError(f"The output file {path} cannot be written: {error.strerror}.") from error

    def write(self, result: Result) -> None:
        """Append one line."""
        self._file.write(result.model_dump_json() + "\n")
        self._file.flush()

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._path is not None:
            self._file.close()
