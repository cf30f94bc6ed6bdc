"""Results of a job: one JSON line per prompt."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

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
    log_probabilities: tuple[float, ...] | None = None
    """Of each of `token_ids`; left out of the line where they were not asked for."""

    @model_serializer(mode="wrap")
    def _asked(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = whole(self)
        if self.log_probabilities is None:
            del document["log_probabilities"]
        return document

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
            log_probabilities=completion.log_probabilities,
        )

    @staticmethod
    def of_bad_line(line: BadLine) -> Result:
        return Result(id=line.id, completion="", token_ids=(), prompt_tokens=0, finish_reason="error", error=line.error)
