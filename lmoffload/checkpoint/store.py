"""The store of quantized weights: for each (model, format) a folder in the user's cache directory.

Tensors are appended one by one to one data file, each on whole pages; a tensor counts once its line stands in the manifest, which is
written after the bytes are on the disk. So a killed process leaves a shorter store, and the next one goes on from there. One process
writes at a time. A store whose source files changed is made anew, in another data file: whoever still reads the old one keeps it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmoffload.checkpoint.encode import can_hold, encoded, source_digest
from lmoffload.checkpoint.importance import Importance, needs_importance, read_importance, rounding_of
from lmoffload.checkpoint.manifest import (
    MANIFEST_FILE,
    VERSION,
    Header,
    Manifest,
    SourceFile,
    StoredTensor,
    mend,
    padded_bytes,
    read_manifest,
    write_header,
)
from lmoffload.documents import sync_folder
from lmoffload.settings import Settings
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED, stored_bytes
from lmoffload_solver.model import ModelShape

if TYPE_CHECKING:
    from lmoffload.checkpoint.checkpoint import Checkpoint

LOCK_FILE = "lock"


@dataclass(frozen=True, slots=True)
class StoreProgress:
    """How far the preparation of a store is."""

    format: str
    tensor: str
    """Written last."""
    done_bytes: int
    total_bytes: int


def store_folder(checkpoint: Checkpoint, format_name: str, cache: Path | None = None) -> Path:
    """Where the store of a model in a format lies. cache: the user's cache directory by default."""
    cache = Settings.of_user().cache_directory if cache is None else cache
    return cache / "weights" / checkpoint.fingerprint / format_name


def store_bytes(shape: ModelShape, names: Iterable[str], format_name: str) -> int:
    """Bytes that these tensors take in a store, exactly."""
    return sum(padded_bytes(stored_bytes(shape.by_name[name].shape, format_name)) for name in names)


def open_store(checkpoint: Checkpoint, format_name: str, names: Sequence[str], cache: Path | None = None) -> Manifest | None:
    """The store if it holds all these tensors of the model as it is now, rounded as they would be now; else None. Writes nothing."""
    manifest = read_manifest(store_folder(checkpoint, format_name, cache))
    if manifest is None or not _same_files(manifest, checkpoint):
        return None
    if manifest.header.rounding != rounding_of(format_name, _importance(checkpoint, format_name, cache)):
        return None
    return manifest if {tensor.name for tensor in manifest.tensors} >= set(names) else None


def prepare_store(
    checkpoint: Checkpoint,
    format_name: str,
    names: Sequence[str] | None = None,
    *,
    cache: Path | None = None,
    on_progress: Callable[[StoreProgress], None] = lambda progress: None,
) -> Manifest:
    """The store with these tensors (None: every one that the format can hold), quantizing those that are not there yet.

    Waits while another process writes the same store.

    Raises:
        StatedError: a tensor cannot be held in the format, the disk has not the room, or a file cannot be read or written.
    """
    assert format_name in QUANTIZED, f"{format_name} is no format of a store"
    shape = checkpoint.shape
    names = [t.name for t in shape.tensors if can_hold(t, format_name)] if names is None else list(names)
    for name in names:
        if not can_hold(shape.by_name[name], format_name):
            raise StatedError(f"The tensor {name} of shape {list(shape.by_name[name].shape)} cannot be stored as {format_name}.")
    found = open_store(checkpoint, format_name, names, cache)
    if found is not None:
        return found
    folder = store_folder(checkpoint, format_name, cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            importance = _importance(checkpoint, format_name, cache)
            manifest = _begun(checkpoint, format_name, folder, rounding_of(format_name, importance))
            return _filled(checkpoint, manifest, names, importance, on_progress)
    except OSError as error:
        raise StatedError(f"The quantized weights cannot be written to {folder}: {error.strerror or error}.") from error


def remove_store(checkpoint: Checkpoint, format_name: str, cache: Path | None = None) -> None:
    """Remove a store, if there is one, when nobody writes it; whoever reads its file keeps it until closed.

    Raises:
        StatedError: it cannot be removed.
    """
    folder = store_folder(checkpoint, format_name, cache)
    try:
        if folder.is_dir():
            with _lock(folder):
                (folder / MANIFEST_FILE).unlink(missing_ok=True)
                for data in folder.glob("weights-*"):
                    data.unlink()
    except OSError as error:
        raise StatedError(f"The quantized weights in {folder} cannot be removed: {error.strerror or error}.") from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by the process, so that a killed one leaves none behind."""
    with (folder / LOCK_FILE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _same_files(manifest: Manifest, checkpoint: Checkpoint) -> bool:
    try:
        return manifest.header.sources == _source_files(checkpoint)
    except OSError:
        return False


def _source_files(checkpoint: Checkpoint) -> tuple[SourceFile, ...]:
    return tuple(SourceFile.of(path) for path in checkpoint.files)


def _importance(checkpoint: Checkpoint, format_name: str, cache: Path | None) -> Importance | None:
    """What weights of the model are rounded to the format by."""
    return read_importance(checkpoint.fingerprint, cache) if needs_importance(format_name) else None


def _begun(checkpoint: Checkpoint, format_name: str, folder: Path, rounding: str) -> Manifest:
    """The manifest to go on from: as far as it was, or a new one where the source, or how it is rounded, has changed."""
    mend(folder)
    manifest, sources = read_manifest(folder), _source_files(checkpoint)
    if manifest is not None and manifest.header.rounding != rounding:
        manifest = None
    if manifest is not None and manifest.header.sources == sources:
        return manifest
    if manifest is not None and _same_weights(manifest, checkpoint):  # touched or copied, but the same bytes
        return write_header(folder, manifest.header.model_copy(update={"sources": sources}), manifest.tensors)
    for leftover in folder.glob("weights-*"):
        leftover.unlink(missing_ok=True)
    data_file = f"weights-{secrets.token_hex(4)}"
    (folder / data_file).touch()
    header = Header(
        version=VERSION, model=checkpoint.fingerprint, format=format_name, rounding=rounding, data_file=data_file, sources=sources
    )
    return write_header(folder, header)


def _same_weights(manifest: Manifest, checkpoint: Checkpoint) -> bool:
    shapes = checkpoint.shape.by_name
    return all(
        tensor.name in shapes
        and tensor.shape == shapes[tensor.name].shape
        and tensor.source_sha256 == source_digest(checkpoint.source(tensor.name), tensor.name)
        for tensor in manifest.tensors
    )


def _filled(
    checkpoint: Checkpoint,
    manifest: Manifest,
    names: Sequence[str],
    importance: Importance | None,
    on_progress: Callable[[StoreProgress], None],
) -> Manifest:
    format_name, held = manifest.header.format, {tensor.name for tensor in manifest.tensors}
    missing = [name for name in names if name not in held]
    total = store_bytes(checkpoint.shape, names, format_name)
    done = total - store_bytes(checkpoint.shape, missing, format_name)
    _check_room(manifest.folder, total - done, format_name)
    for name in missing:
        tensor, digest = checkpoint.shape.by_name[name], hashlib.sha256()
        squares = None if importance is None else importance.squares.get(name)
        num_bytes = append(manifest.data_path, manifest.end_bytes, encoded(checkpoint, tensor, format_name, digest, squares))
        assert num_bytes == stored_bytes(tensor.shape, format_name), "a tensor was encoded to another size than its format has"
        stored = StoredTensor(
            name=name, shape=tensor.shape, offset_bytes=manifest.end_bytes, num_bytes=num_bytes, source_sha256=digest.hexdigest()
        )
        manifest = manifest.with_tensor(stored)
        done += padded_bytes(num_bytes)
        on_progress(StoreProgress(format_name, name, done, total))
    return manifest


def _check_room(folder: Path, needed: int, format_name: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StatedError(
            f"The {format_name} weights need {needed} bytes more in {folder}, where {free} are free: make room, or set XDG_CACHE_HOME."
        )


def append(path: Path, offset: int, pieces: Iterable[npt.NDArray[np.uint8]]) -> int:
    """Write pieces to a file from `offset` (a page), durably, filled up to whole pages, leaving nothing in the page cache; their bytes."""
    with path.open("r+b") as file:
        file.truncate(offset)
        file.seek(offset)
        num_bytes = sum(file.write(piece.data) for piece in pieces)
        file.write(bytes(padded_bytes(num_bytes) - num_bytes))
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sync_folder(path.parent)
    return num_bytes
