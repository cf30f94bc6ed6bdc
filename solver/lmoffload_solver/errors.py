"""Errors that are told to people: one sentence that names what to do."""

from __future__ import annotations


class StatedError(Exception):
    """A mistake in the input or the surroundings, told in one sentence. Exit code 1."""

    exit_code = 1


class UsageError(StatedError):
    """Wrong usage of a command or function. Exit code 2."""

    exit_code = 2


class InfeasibleError(StatedError):
    """No plan exists within the limits; nothing was run. Exit code 3."""

    exit_code = 3
