"""The report of an error that nobody foresaw: a file to attach to an issue."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lmoffload.profiler.limits import read_limits
from lmoffload.profiler.processor import versions
from lmoffload.settings import Settings

TEXTS = ("-p", "--prompt", "--stop")
"""Options whose values are the user's own text, which stays out of reports."""


def write_failure(error: BaseException, arguments: Sequence[str]) -> Path | None:
    """Write what was called, where it failed and on what; returns the file, None where none can be written."""
    now = datetime.now()
    folder = Settings.of_user().cache_directory / "errors"
    path = folder / f"{now:%Y-%m-%d-%H%M%S-%f}.txt"
    try:
        text = "\n".join(
            (
                f"lmoffload {' '.join(_told(arguments))}",
                f"at {now:%Y-%m-%d %H:%M:%S}",
                " ".join(f"{name} {version}" for name, version in versions().items()),
                read_limits().model_dump_json(),
                "",
                "".join(traceback.format_exception(error)),
            )
        )
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except Exception:  # the error itself is what must be told
        return None
    return path


def _told(arguments: Sequence[str]) -> list[str]:
    """The arguments, without what users write."""
    told, hidden = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hidden:
            told.append("TEXT")
        elif equals and name in TEXTS:
            told.append(f"{name}=TEXT")
        elif argument.startswith("-p") and argument != "-p" and not argument.startswith("--"):
            told.append("-pTEXT")
        else:
            told.append(argument)
        hidden = not hidden and argument in TEXTS
    return told
