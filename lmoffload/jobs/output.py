"""The output file of a job: locked while a run writes to it, and gone on with by the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from lmoffload.documents import check_place, sync_folder
from lmoffload.errors import StatedError
from lmoffload.jobs.manifest import Manifest, manifest_place, read_manifest, write_manifest
from lmoffload.jobs.results import Result
from lmoffload.jobs.tables import is_table, write_table
from lmoffload.units import format_bytes

SYNC_EVERY_S = 1.0
"""Within a block, whose places may be taken again and again; its end brings to the disk what was written."""

BYTES_PER_TOKEN, BYTES_PER_LINE = 20, 400
"""Of an output line, generously: a token's number and text; names, id and punctuation."""


def lines_place(output: Path) -> Path:
    """Where the lines of a job are written as prompts finish: a table cannot be added to, so they lie beside it."""
    return output.with_name(output.name + ".jsonl") if is_table(output) else output


@contextmanager
def job_output(output: Path, restart: bool) -> Iterator[JobOutput]:
    """The output of a job. A table is written when this ends without an error, from all lines.

    Raises:
        StatedError: as `JobOutput` does; or a table is there that no job has made.
    """
    lines = lines_place(output)
    with JobOutput(lines, restart, copies=1 if lines == output else 2) as opened:
        if lines != output and output.exists() and opened.begun is None and not restart:
            raise StatedError(
                f"The table {output} exists already, without the lines {lines.name} of a job that could go on; name another, or give "
                "--restart to write it anew."
            )
        yield opened
        if lines != output:
            opened.sync(0)
            write_table(output, lines, opened.ids)


class JobOutput:
    """A context manager. The file itself carries the lock, which ends with the process however it ends. Until `begin`, nothing that is
    there is changed; a file that is empty at the end is removed.

    Args:
        copies: as many times the results will take their room on the disk.

    Raises:
        StatedError: another run writes to it, it cannot be written there, or `restart` is false and it is no job's.
    """

    def __init__(self, path: Path, restart: bool = False, copies: int = 1) -> None:
        check_place(path, "output file")
        self.path, self._restart, self._copies = path, restart, copies
        self._descriptor = -1
        self.begun: Manifest | None = None
        """What made the lines that are there."""
        self.finished: frozenset[str] = frozenset()
        """Ids of those of them that have not failed."""
        self.ids: tuple[str, ...] = ()
        """Of all lines of the job in the input's order, once it is known."""
        self._kept = b""
        self._synced_s = 0.0

    def __enter__(self) -> JobOutput:
        try:
            self._descriptor = _locked(self.path)
            data = self.path.read_bytes() if self.path.is_file() and not self._restart else b""
        except OSError as error:
            raise StatedError(f"The output file {self.path} cannot be opened: {error.strerror}.") from error
        try:
            if data:
                self.begun = read_manifest(self.path)
                if self.begun is None:
                    raise StatedError(
                        f"The output file {self.path} exists already, without the manifest {manifest_place(self.path).name} of a job that "
                        "could go on; name another, or give --restart to write it anew."
                    )
                self._kept, self.finished = _finished_lines(data)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def begin(self, manifest: Manifest, num_tokens: int) -> None:
        """Write the manifest, and drop what a run before left unfinished or failed.

        Args:
            num_tokens: that are to be generated at most.

        Raises:
            StatedError: the disk has no room for the results, or the file cannot be written.
        """
        self._check_space(self._copies * (manifest.num_lines * BYTES_PER_LINE + num_tokens * BYTES_PER_TOKEN))
        if not self.path.is_file():
            return
        try:
            if self._restart:
                os.ftruncate(self._descriptor, 0)
            write_manifest(self.path, manifest)
            self._keep_finished()
            self._kept = b""
        except OSError as error:
            raise self._failed(error) from error

    def write(self, result: Result) -> None:
        """Append one line, whole or not at all.

        Raises:
            StatedError: the disk is full, or the file cannot be written.
        """
        line = (result.model_dump_json() + "\n").encode()
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # the disk is full, or nearly
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            raise self._failed(error) from error

    def sync(self, every_s: float) -> None:
        """Bring what was written to the disk, unless that was done less than `every_s` ago.

        Raises:
            StatedError: the device reports an error.
        """
        now = time.monotonic()
        if now - self._synced_s < every_s or not self.path.is_file():
            return
        self._synced_s = now
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):
            if self.path.is_file():
                os.fsync(self._descriptor)
                if os.fstat(self._descriptor).st_size == 0:
                    manifest_place(self.path).unlink(missing_ok=True)
                    self.path.unlink()
        with suppress(OSError):
            os.close(self._descriptor)

    def _keep_finished(self) -> None:
        """Cut off a line that was not finished; where failed ones lie between, write the others to a file that takes this one's place."""
        size, kept = os.fstat(self._descriptor).st_size, len(self._kept)
        with open(self.path, "rb") as file:
            if file.read(kept) == self._kept:
                if size != kept:
                    os.ftruncate(self._descriptor, kept)
                return
        target = self.path.resolve()
        descriptor, part = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
            with open(part, "ab") as file:
                file.write(self._kept)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(part, os.fstat(self._descriptor).st_mode & 0o777)
            os.replace(part, target)
            sync_folder(target.parent)
        except BaseException:
            os.close(descriptor)
            os.unlink(part)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path.resolve().parent).free
        if self.path.is_file() and free < needed:
            raise StatedError(
                f"The results may take {format_bytes(needed)}, and {format_bytes(free)} are free where {self.path} lies: "
                "make room, or name an output on another disk."
            )

    def _failed(self, error: OSError) -> StatedError:
        return StatedError(
            f"The output file {self.path} cannot be written: {error.strerror}; the lines in it are whole or will be cut off, and the same "
            "command goes on with it."
        )


def _locked(path: Path) -> int:
    """A descriptor that appends to the file, made where there is none, and holds its lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if not path.is_file():
                return descriptor  # a pipe or a device: nothing to lock
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise StatedError(f"Another run is writing to the output file {path}; wait for it to end, or name another.") from None
        os.close(descriptor)  # whoever held it has put another file there, or removed it


def _finished_lines(data: bytes) -> tuple[bytes, frozenset[str]]:
    """The lines that hold a result that has not failed, byte for byte, and their ids; of one id the first."""
    kept: dict[str, bytes] = {}
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        try:
            result = Result.model_validate_json(line)
        except ValidationError:
            continue
        if result.finish_reason != "error":
            kept.setdefault(result.id, line)
    return b"".join(kept.values()), frozenset(kept)
