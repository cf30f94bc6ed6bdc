"""Direct reads: aligned, past the page cache, with the GIL released."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from lmoffload_solver.errors import StatedError
from lmoffload_solver.schedule import PAGE_BYTES


class DirectFile:
    """A file opened for direct reads; where the file system refuses them, for buffered ones that leave no pages behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct = True
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            self._probe()
        except OSError:
            self._open_buffered()
        self.num_bytes = os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` (both page-aligned); bytes past the end of the file stay as they are.

        Raises:
            StatedError: the device reports an error, or the file has become shorter than the buffer asks.
        """
        wanted = min(len(buffer), self.num_bytes - offset)
        done = 0
        while done < wanted:
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise StatedError(f"Reading {self.path} at byte {offset + done} failed: {error.strerror}.") from error
            if count == 0:
                raise StatedError(f"{self.path} became shorter while it was read: {offset + done} bytes, expected {self.num_bytes}.")
            done += count
            if done < wanted and done % PAGE_BYTES:
                done = done // PAGE_BYTES * PAGE_BYTES  # a direct read must go on from a page boundary
        if not self.direct:
            os.posix_fadvise(self._fd, offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _probe(self) -> None:
        """Some file systems accept O_DIRECT at open and refuse the first read."""
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(self._fd, [page], 0)

    def _open_buffered(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)
        self.direct = False
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise StatedError(f"{self.path} cannot be read: {error.strerror}.") from error
