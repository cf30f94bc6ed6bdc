"""Results of a job: one JSON line per prompt."""

from __future__ import annotations

from typing import Literal

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
