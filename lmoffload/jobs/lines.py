"""Lines of a job file: JSON objects in UTF-8, one prompt each. Every line gives exactly one result, a bad one included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from lmoffload.errors import StatedError
from lmoffload.executor.request import Sampling
from lmoffload.jobs.tables import is_table, lines_of_table
from lmoffload_solver.value import Value


class Message(Value):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class JobLine(Value):
    """What a line asks for: `prompt` is raw text, `messages` are wrapped in the model's chat template."""

    id: str | None = Field(default=None, min_length=1)
    prompt: str | None = None
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)
    max_new_tokens: int | None = Field(default=None, gt=0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    stop: tuple[str, ...] = ()

    @property
    def sampling(self) -> Sampling:
        """What the line itself wishes."""
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("a stop string is empty")
        return stop

    @model_validator(mode="after")
    def _one_source(self) -> JobLine:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages must be there, and not both")
        return self


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be run, and why (one sentence)."""

    id: str
    error: str


def read_lines(path: Path) -> tuple[JobLine | BadLine, ...]:
    """The lines of a job file in order, or the rows of a table; those without an id get their number, from 1.

    Raises:
        StatedError: the file cannot be read or is empty, or two lines have one id.
    """
    try:
        data = lines_of_table(path) if is_table(path) else path.read_bytes()
    except OSError as error:
        raise StatedError(f"The job file {path} cannot be read: {error.strerror}.") from error
    noun = "row" if is_table(path) else "line"
    raw = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not raw[-1].strip():
        raw.pop()
    if not raw:
        raise StatedError(f"The job file {path} has no {noun}s.")
    lines = tuple(_parse(line, str(number), noun.capitalize()) for number, line in enumerate(raw, 1))
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        assert line.id is not None
        if line.id in seen:
            raise StatedError(f"The job file {path} uses the id {line.id!r} twice, in {noun}s {seen[line.id]} and {number}.")
        seen[line.id] = number
    return lines


def line_of_prompt(line_id: str, prompt: str | Sequence[Mapping[str, str]]) -> JobLine | BadLine:
    """The line that asks for one raw text, or for the answer to one conversation."""
    if isinstance(prompt, str):
        return JobLine(id=line_id, prompt=prompt)
    try:
        return JobLine.model_validate({"id": line_id, "messages": list(prompt)})
    except ValidationError as error:
        return BadLine(line_id, f"Prompt {line_id} is not valid: {_first_reason(error)}.")


def _parse(raw: bytes, number: str, noun: str) -> JobLine | BadLine:
    if not raw.strip():
        return BadLine(number, f"{noun} {number} is empty.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return BadLine(number, f"{noun} {number} is not UTF-8 text.")
    try:
        line = JobLine.model_validate_json(text)
    except ValidationError as error:
        return BadLine(_stated_id(error) or number, f"{noun} {number} is not valid: {_first_reason(error)}.")
    return line if line.id is not None else line.model_copy(update={"id": number})


def _stated_id(error: ValidationError) -> str | None:
    """The id of a line that is an object, though one with another fault."""
    for detail in error.errors():
        given: Any = detail["input"]
        if len(detail["loc"]) <= 1 and isinstance(given, Mapping):
            stated = given.get("id")
            return stated if isinstance(stated, str) and stated else None
    return None


def _first_reason(error: ValidationError) -> str:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {message}" if place else message
