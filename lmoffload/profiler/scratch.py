"""The scratch file on which a disk is measured: nameless, of random bytes, written past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lmoffload.executor.direct_file import DirectFile
from lmoffload_solver.errors import StatedError

CHUNK_BYTES = 16 << 20
"""Scratch files are filled in pieces of this size."""


class ScratchFile:
    """A file that has lost its name as soon as it is open: whatever happens to the process, the file system takes its space back.

    Attributes:
        num_bytes: its size.
        reader: the executor's direct reads of it.
        direct_writes: writes go past the page cache; False for good once the file system refuses one.
    """

    def __init__(self, directory: Path, num_bytes: int, *, fill_budget_s: float = 60.0) -> None:
        """Create a file in `directory` and fill it with up to `num_bytes` (whole chunks), fewer where the device needs too long.

        Raises:
            StatedError: the directory cannot be written, or its device fails.
        """
        self._descriptors: list[int] = []
        self.direct_writes = hasattr(os, "O_DIRECT")
        try:
            self._create(directory)
            self.num_bytes = self._fill(num_bytes, fill_budget_s)
            self.reader = DirectFile(Path(f"/proc/self/fd/{self._descriptors[0]}"))
        except OSError as error:
            self._close_descriptors()
            raise StatedError(f"The disk of {directory} cannot be measured: {error.strerror or error}.") from error
        except BaseException:
            self._close_descriptors()
            raise

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write `buffer` (page-aligned, whole pages) at `offset`; it has left the page cache on return."""
        done = 0
        while done < len(buffer):
            direct = self.direct_writes
            try:
                done += os.pwritev(self._descriptors[-1 if direct else 0], [buffer[done:]], offset + done)
            except OSError as error:
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct_writes = False
        if not self.direct_writes:
            os.fdatasync(self._descriptors[0])
            drop_pages(self._descriptors[0], offset, len(buffer))

    def close(self) -> None:
        """Give the space back."""
        self.reader.close()
        self._close_descriptors()

    def _create(self, directory: Path) -> None:
        descriptor, name = tempfile.mkstemp(prefix=".lmoffload-profile-", dir=directory)
        try:
            self._descriptors.append(descriptor)
            self._descriptors.append(os.open(name, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct_writes = False
        finally:
            os.unlink(name)

    def _fill(self, num_bytes: int, budget_s: float) -> int:
        """Returns the bytes written: at least one chunk. Random, because some devices compress and some never store zeros."""
        view = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        for begin in range(0, CHUNK_BYTES, 1 << 20):
            view[begin : begin + (1 << 20)] = os.urandom(1 << 20)
        end, filled = time.perf_counter() + budget_s, 0
        while filled < num_bytes and (filled == 0 or time.perf_counter() < end):
            view[:8] = filled.to_bytes(8, "little")
            self.write(filled, view)
            filled += CHUNK_BYTES
        os.fsync(self._descriptors[0])
        drop_pages(self._descriptors[0])
        return filled

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def drop_pages(descriptor: int, offset: int = 0, num_bytes: int = 0) -> None:
    """Drop a file's clean pages from the page cache (all of them by default), where the file system lets us."""
    with suppress(OSError):
        os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
