"""The file on which a disk is measured: a scratch file, or where nothing can be written the largest file found there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmoffload.executor.direct_file import DirectFile
from lmoffload.profiler.scratch import CHUNK_BYTES, ScratchFile, drop_pages
from lmoffload_solver.errors import StatedError
from lmoffload_solver.schedule import PAGE_BYTES

Way = Literal["read", "write"]
MIB = 1 << 20
MOST_BYTES = 1 << 30
FREE_SHARE = 8
"""The scratch file takes at most one part in this many of the free space."""
SMALLEST_BYTES = 2 * CHUNK_BYTES
"""Below this size a file says nothing about large requests."""


@dataclass(frozen=True, slots=True)
class Target:
    """The file under measurement."""

    reader: DirectFile
    num_bytes: int
    scratch: ScratchFile | None
    """None where nothing can be written and a file found there is read."""

    def request(self, way: Way, offset: int, buffer: memoryview) -> None:
        if way == "read":
            self.reader.read_into(buffer, offset)
        else:
            assert self.scratch is not None, "a file found on the disk is never written"
            self.scratch.write(offset, buffer)


@contextmanager
def opened(path: Path, free_bytes: int, budget_s: float, most_bytes: int = MOST_BYTES) -> Iterator[Target]:
    """The file to measure."""
    folder = _scratch_folder(path)
    if folder is None:
        existing = _largest_file(path)
        if existing is None:
            raise StatedError(f"The disk of {path} cannot be measured: nothing can be written there; give --disk a folder that can be.")
        file = DirectFile(existing)
        try:
            with existing.open("rb") as cached:
                drop_pages(cached.fileno())
            yield Target(file, file.num_bytes // PAGE_BYTES * PAGE_BYTES, None)
        finally:
            file.close()
        return
    wanted = max(4 * CHUNK_BYTES, min(most_bytes, int(budget_s * 32) * MIB))
    num_bytes = min(wanted, free_bytes // FREE_SHARE) // CHUNK_BYTES * CHUNK_BYTES
    if num_bytes < SMALLEST_BYTES:
        raise StatedError(
            f"The disk of {path} has {free_bytes / 1e6:.0f} MB free and measuring it needs {FREE_SHARE * SMALLEST_BYTES / 1e6:.0f} MB; "
            "free some, or give --disk another place."
        )
    scratch = ScratchFile(folder, num_bytes, fill_budget_s=budget_s * 0.15)
    try:
        yield Target(scratch.reader, scratch.num_bytes, scratch)
    finally:
        scratch.close()


def _scratch_folder(path: Path) -> Path | None:
    """A folder on the file system of `path` that can be written, the user's own before the one beside `path`."""
    from platformdirs import user_cache_path

    place = _existing(path)
    own = place if place.is_dir() else place.parent
    device = own.stat().st_dev
    for folder in (_existing(user_cache_path("lmoffload")), Path(tempfile.gettempdir()), own):
        if folder.stat().st_dev == device and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


def _existing(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    place = path.resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _largest_file(path: Path) -> Path | None:
    place = _existing(path)
    files = [place] if place.is_file() else [found for found in place.glob("**/*") if found.is_file()]
    large = [file.resolve() for file in files if file.stat().st_size >= SMALLEST_BYTES and os.access(file, os.R_OK)]
    return max(large, key=lambda file: file.stat().st_size, default=None)
