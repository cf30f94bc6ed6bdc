"""Keys and values on the disk: a file without a name, and the server that writes to it."""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmoffload.executor.pending import Pending
from lmoffload.executor.turns import take_short_turns
from lmoffload_solver.errors import StatedError
from lmoffload_solver.schedule import PAGE_BYTES


class SpillFile:
    """`num_bytes` (whole pages) on the disk of a folder, for direct reads and writes where its file system takes them. The file has no
    name: however the process ends, nothing is left of it.

    Raises:
        StatedError: the folder cannot be written to or its disk is full.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd, name = tempfile.mkstemp(prefix="kv-", dir=folder)
            self.path = Path(name)
            """A name that no other file has, though it has none any more."""
            os.unlink(name)
        except OSError as error:
            raise StatedError(f"Keys and values cannot be kept in {folder}: {error.strerror}.") from error
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            os.close(self._fd)
            free = shutil.disk_usage(folder).free
            raise StatedError(
                f"Keys and values need {num_bytes} bytes on the disk of {folder}, where {free} are free ({error.strerror}): "
                "make room, or make a plan with less disk space."
            ) from error
        self.direct = self._set_direct()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; both whole pages.

        Raises:
            StatedError: the device reports an error.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise StatedError(f"Reading keys and values on the disk of {self._folder} failed: {error.strerror}.") from error
            assert count > 0, "the file is as long as it was made"
            done += count

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write whole pages.

        Raises:
            StatedError: the disk is full or reports an error.
        """
        done = 0
        while done < len(buffer):
            try:
                done += os.pwritev(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise StatedError(f"Writing keys and values on the disk of {self._folder} failed: {error.strerror}.") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set_direct(self) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(self._fd, [page], 0)
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True


@dataclass(slots=True)
class Writing(Pending):
    """A write task under way: pages of a buffer, each range to its place in the file."""

    file: SpillFile
    ranges: Sequence[tuple[memoryview, int]]


class DiskWriter:
    """Does write tasks in the order they are enqueued, in a thread that releases the GIL."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Writing | None] = queue.SimpleQueue()
        self._server = threading.Thread(target=self._serve, name="lmoffload-write", daemon=True)
        self._server.start()

    def enqueue(self, writing: Writing) -> None:
        """Add a write task to the queue."""
        self._queue.put(writing)

    def close(self) -> None:
        """End the thread when all has been written."""
        self._queue.put(None)
        self._server.join()

    def _serve(self) -> None:
        take_short_turns()
        while (writing := self._queue.get()) is not None:
            try:
                writing.begin_s = time.perf_counter()
                for buffer, offset in writing.ranges:
                    writing.file.write_from(buffer, offset)
                writing.end_s = time.perf_counter()
            except BaseException as error:  # surfaces in the thread that waits
                writing.error = error
            finally:
                writing.done.set()
