"""Places that results may be written to."""

from __future__ import annotations

from pathlib import Path

from lmoffload.errors import StatedError


def check_output(path: Path, restart: bool) -> None:
    """Refuse a place that cannot be written to, before anything is computed. Writes nothing.

    Raises:
        StatedError: the file exists and `restart` is false, or its folder does not exist.
    """
    if path.is_dir():
        raise StatedError(f"The output {path} is a folder; name a file.")
    if not path.absolute().parent.is_dir():
        raise StatedError(f"The folder of the output file {path} does not exist.")
    if path.exists() and not restart:
        raise StatedError(f"The output file {path} exists already; name another, or give --restart to write it anew.")
