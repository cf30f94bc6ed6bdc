"""What a store of quantized weights holds: a file of lines, one more for every tensor that is safely on disk.

The first line says what the store was made of and how, each further one names a tensor. A line torn by a crash is no line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lmoffload.documents import sync_folder
from lmoffload_solver.schedule import PAGE_BYTES
from lmoffload_solver.value import Value

VERSION = 2
"""Of the layout of files and tiles, and of each way of rounding; stores of another are made again."""

MANIFEST_FILE = "manifest.jsonl"


class SourceFile(Value):
    """A weight file as it was when the store was made."""

    name: str
    num_bytes: int
    mtime_ns: int

    @staticmethod
    def of(path: Path) -> SourceFile:
        status = path.stat()
        return SourceFile(name=path.name, num_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


class Header(Value):
    """What the store is."""

    version: int
    model: str
    """Fingerprint of the checkpoint."""
    format: str
    rounding: str
    """How the weights were rounded: `importance.rounding_of`."""
    data_file: str
    sources: tuple[SourceFile, ...]


class StoredTensor(Value):
    """A tensor in the store; its bytes begin on a page."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    source_sha256: str
    """Of the bytes that it was made from, as they lay in the checkpoint."""

    @property
    def end_bytes(self) -> int:
        """Where the next tensor begins."""
        return self.offset_bytes + padded_bytes(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A store's header and the tensors that it holds so far, in the order of their bytes."""

    folder: Path
    header: Header
    tensors: tuple[StoredTensor, ...]

    @property
    def data_path(self) -> Path:
        return self.folder / self.header.data_file

    @property
    def end_bytes(self) -> int:
        return self.tensors[-1].end_bytes if self.tensors else 0

    def with_tensor(self, tensor: StoredTensor) -> Manifest:
        """With one more, written down durably."""
        with (self.folder / MANIFEST_FILE).open("ab") as file:
            _write_line(file.fileno(), tensor)
        return Manifest(self.folder, self.header, (*self.tensors, tensor))


def padded_bytes(num_bytes: int) -> int:
    """Bytes that a tensor takes in a store: whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a store; None where there is none, or none that can be used: another version, not valid, or its data cut short."""
    try:
        lines = (folder / MANIFEST_FILE).read_bytes().split(b"\n")[:-1]
        header = Header.model_validate_json(lines[0])
        manifest = Manifest(folder, header, tuple(StoredTensor.model_validate_json(line) for line in lines[1:]))
        complete = manifest.data_path.stat().st_size >= manifest.end_bytes
    except (OSError, IndexError, ValidationError):
        return None
    return manifest if complete and header.version == VERSION else None


def write_header(folder: Path, header: Header, tensors: tuple[StoredTensor, ...] = ()) -> Manifest:
    """Begin a manifest, or replace one as a whole."""
    draft = folder / f"{MANIFEST_FILE}.new"
    with draft.open("wb") as file:
        for value in (header, *tensors):
            _write_line(file.fileno(), value)
    draft.replace(folder / MANIFEST_FILE)
    sync_folder(folder)
    return Manifest(folder, header, tensors)


def mend(folder: Path) -> None:
    """Cut off a line that a crash tore."""
    path = folder / MANIFEST_FILE
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _write_line(fd: int, value: Value) -> None:
    line = value.model_dump_json().encode() + b"\n"
    while line:
        line = line[os.write(fd, line) :]
    os.fsync(fd)
