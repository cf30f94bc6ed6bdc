"""The disk as a resource: a serial server of read tasks, several requests in flight within each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmoffload.executor.buffers import Slab
from lmoffload.executor.direct_file import DirectFile
from lmoffload.executor.extents import Extent
from lmoffload.executor.pending import Pending
from lmoffload.executor.turns import take_short_turns
from lmoffload_solver.schedule import READ_REQUEST_BYTES


class ReadFile(Protocol):
    """A file that is read in whole pages."""

    path: Path
    direct: bool

    def read_into(self, buffer: memoryview, offset: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Reading(Pending):
    """A read task under way."""

    extents: Sequence[Extent]
    buffer: Slab
    ready: Callable[[threading.Event], bool]
    """Waits until the buffer is free; False when the run is being stopped (its argument) meanwhile."""


class DiskReader:
    """Reads extents in the order they are enqueued, `threads` requests in flight, in threads that release the GIL."""

    def __init__(self, files: Sequence[Path], threads: int) -> None:
        self._files: dict[Path, ReadFile] = {path: DirectFile(path) for path in files}
        self._threads = threads
        self.native_ids: list[int] = []
        """The kernel's numbers of the threads that read."""
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="lmoffload-read", initializer=self._enter
        )
        self._queue: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._server = threading.Thread(target=self._serve, name="lmoffload-disk", daemon=True)
        self._server.start()

    @property
    def buffered_files(self) -> tuple[Path, ...]:
        """Files whose file system refused direct reads."""
        return tuple(path for path, file in self._files.items() if not file.direct)

    def attach(self, file: ReadFile) -> None:
        """Read from another file too, under its path; its owner closes it."""
        self._files[file.path] = file

    def detach(self, file: ReadFile) -> None:
        """Forget an attached file."""
        self._files.pop(file.path, None)

    def enqueue(self, reading: Reading) -> None:
        """Add a read task to the queue."""
        self._queue.put(reading)

    def read(self, extents: Sequence[Extent], buffer: Slab) -> None:
        """Read now, in the calling thread's time."""
        requests = [
            (self._files[e.file], buffer.view[e.place + at : e.place + min(at + READ_REQUEST_BYTES, e.num_bytes)], e.offset + at)
            for e in extents
            for at in range(0, e.num_bytes, READ_REQUEST_BYTES)
        ]
        if self._threads == 1 or len(requests) == 1:  # handing over to another thread costs more than a small read
            for file, view, offset in requests:
                file.read_into(view, offset)
            return
        futures = [self._pool.submit(file.read_into, view, offset) for file, view, offset in requests]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()

    def discard(self) -> None:
        """Drop every queued read and wait for the one under way."""
        self._stop.set()
        drained = Reading((), Slab(0), lambda _stop: True)
        self._queue.put(drained)
        drained.done.wait()
        self._stop.clear()

    def close(self) -> None:
        """End all threads and close the files."""
        self._stop.set()
        self._queue.put(None)
        self._server.join()
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def _enter(self) -> None:
        """What a thread that reads does first."""
        self.native_ids.append(threading.get_native_id())
        take_short_turns()

    def _serve(self) -> None:
        take_short_turns()
        while (reading := self._queue.get()) is not None:
            try:
                if self._stop.is_set() or not reading.ready(self._stop):
                    continue
                reading.begin_s = time.perf_counter()
                self.read(reading.extents, reading.buffer)
                reading.end_s = time.perf_counter()
            except BaseException as error:  # surfaces in the thread that waits for the bytes
                reading.error = error
            finally:
                reading.done.set()
