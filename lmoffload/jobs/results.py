"""Results of a job: one JSON line per prompt, written as each finishes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from lmoffload.errors import StatedError
from lmoffload.executor.request import Completion
from lmoffload.jobs.lines import BadLine
from lmoffload.jobs.output import check_output
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


class ResultWriter:
    """Writes results to a file, or to standard output where `path` is None; a line is there as soon as it is written. A context manager.

    The file is opened with the first line, so that a job that fails before it leaves none."""

    def __init__(self, path: Path | None, restart: bool = False) -> None:
        """
        Raises:
            StatedError: see `check_output`.
        """
        self._path, self._restart = path, restart
        self._file: IO[str] | None = None
        if path is not None:
            check_output(path, restart)

    def write(self, result: Result) -> None:
        """Append one line.

        Raises:
            StatedError: the file cannot be written.
        """
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(result.model_dump_json() + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StatedError(f"The output file {self._path or 'on stdout'} cannot be written: {error.strerror}.") from error

    def _open(self) -> IO[str]:
        if self._path is None:
            return sys.stdout
        return self._path.open("w" if self._restart else "x", encoding="utf-8", newline="\n")

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
