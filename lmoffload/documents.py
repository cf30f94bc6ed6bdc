"""Files that people ask for: their places are checked before anything is computed, and documents are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmoffload.errors import StatedError, UsageError


def check_place(path: Path, what: str) -> None:
    """Refuse a place that a file cannot be written to. Writes nothing.

    Raises:
        StatedError: it is a folder, its folder does not exist, or the user may not write there.
    """
    if path.is_dir():
        raise StatedError(f"The {what} {path} is a folder; name a file.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise StatedError(f"The folder of the {what} {path} does not exist.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise StatedError(f"The {what} {path} cannot be written: its place is read-only for you.")


def require_distinct(written: Iterable[tuple[str, Path | None]], read: Iterable[tuple[str, Path | None]]) -> None:
    """Refuse to write one file twice, or over a file that is read: nothing of the user's is lost by a slip.

    Args:
        written, read: options and the files given for them, None where not given.

    Raises:
        UsageError: two options name one file.
    """
    seen = {path.resolve(): option for option, path in read if path is not None}
    for option, path in written:
        if path is None or (path.exists() and not path.is_file()):
            continue  # a terminal or /dev/null may be named twice
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise UsageError(f"Both {other} and {option} name {path}; give each a file of its own.")


@contextmanager
def whole_file(path: Path, what: str) -> Iterator[Path]:
    """A place to write a file to, which takes its own place when this ends without an error, and is removed otherwise. A link is followed.

    Raises:
        StatedError: it cannot be written.
    """
    try:
        check_place(path, what)
        target = path.resolve()
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
        os.close(descriptor)
        part = Path(name)
        try:
            yield part
            os.chmod(part, 0o644)
            _sync(part)  # before the name is its: what a power cut leaves is the whole of the old or of the new
            os.replace(part, target)
            sync_folder(target.parent)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise StatedError(f"The {what} {path} cannot be written: {error.strerror or error}.") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system can."""
    with suppress(OSError):  # a folder may be one to write to and not to read, and some file systems refuse
        _sync(folder)


def write_whole(path: Path, text: str, what: str) -> None:
    """Write a file, whole or not at all; a link is followed, and what is no regular file (a pipe, /dev/stdout) is written to in place.

    Raises:
        StatedError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        check_place(path, what)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StatedError(f"The {what} {path} cannot be written: {error.strerror or error}.") from error
        return
    with whole_file(path, what) as part:
        part.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
