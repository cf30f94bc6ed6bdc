"""Errors as people are told them: one sentence each. The types are the solver's, so that every room raises the same ones."""

from __future__ import annotations

from pathlib import Path

from lmoffload_solver.errors import InfeasibleError, StatedError, UsageError

__all__ = ["InfeasibleError", "StatedError", "UsageError", "is_foreseen", "sentence_of"]


def is_foreseen(error: BaseException) -> bool:
    """Whether `error` is of the input or the surroundings, and no fault of lmoffload's."""
    return isinstance(error, StatedError | MemoryError) or (isinstance(error, OSError) and bool(error.strerror))


def sentence_of(error: BaseException, report: Path | None = None) -> str:
    """The one sentence that tells `error` to a person. report: the file that says more of what nobody foresaw."""
    if isinstance(error, StatedError):
        return str(error)
    if isinstance(error, MemoryError):
        return "The memory did not suffice; give a smaller --host-memory, so that a smaller plan is made."
    if isinstance(error, OSError) and error.strerror:
        place = f" {error.filename}" if error.filename else ""
        return f"The file system refused{place}: {error.strerror}."
    text = " ".join(str(error).split()) or "no further word"
    more = "run it again with --debug to see where" if report is None else f"please attach {report} to an issue, or see where with --debug"
    return f"lmoffload failed unexpectedly ({type(error).__name__}: {text:.300}); {more}."
