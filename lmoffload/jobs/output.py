"""Places that results may be written to."""

from __future__ import annotations

from pathlib import Path

from lmoffload.documents import check_place
from lmoffload.errors import StatedError


def check_output(path: Path, restart: bool) -> None:
    """Refuse a place that cannot be written to, before anything is computed. Writes nothing.

    Raises:
        StatedError: the file exists and `restart` is false, or it cannot be written there.
    """
    check_place(path, "output file")
    if path.exists() and not restart:
        raise StatedError(f"The output file {path} exists already; name another, or give --restart to write it anew.")
