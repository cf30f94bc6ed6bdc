"""Errors as people are told them: one sentence each. The types are the solver's, so that every room raises the same ones."""

from __future__ import annotations

from lmoffload_solver.errors import InfeasibleError, StatedError, UsageError

__all__ = ["InfeasibleError", "StatedError", "UsageError", "sentence_of"]


def sentence_of(error: BaseException) -> str:
    """The one sentence that tells `error` to a person."""
    if isinstance(error, StatedError):
        return str(error)
    if isinstance(error, MemoryError):
        return "The memory did not suffice; give a smaller --host-memory, so that a smaller plan is made."
    if isinstance(error, OSError) and error.strerror:
        place = f" {error.filename}" if error.filename else ""
        return f"The file system refused{place}: {error.strerror}."
    text = " ".join(str(error).split()) or "no further word"
    return f"lmoffload failed unexpectedly ({type(error).__name__}: {text}); run it again with --debug to see where."
