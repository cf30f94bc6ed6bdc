"""TensorSource: where one tensor lies on disk and how it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import FORMATS

STORED_FORMATS = tuple(FORMATS)
"""Formats of stored tensors that are read in place."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """One tensor, read in place: it lies together in a file, or in several equal parts of whole rows (`parts`)."""

    file: Path
    offset_bytes: int
    num_bytes: int
    format: str
    """A key of `lmoffload_solver.formats.FORMATS`, or the file's own name of a type that is not supported."""
    shape: tuple[int, ...]
    row_order: npt.NDArray[np.int64] | None = None
    """int64 [rows]: row j of the transformers parameter is stored as row `row_order[j]`; None when they are stored in order."""
    parts: tuple[TensorSource, ...] = ()
    """Of a tensor in several parts those, in the order of its rows; `file` and `offset_bytes` are then the first one's."""

    @property
    def runs(self) -> tuple[TensorSource, ...]:
        """What lies together: the tensor itself, or its parts."""
        return self.parts or (self,)

    @staticmethod
    def joined(parts: Sequence[TensorSource], shape: tuple[int, ...]) -> TensorSource:
        """One tensor of several stored ones of the same shape and format."""
        first = parts[0]
        return TensorSource(first.file, first.offset_bytes, sum(p.num_bytes for p in parts), first.format, shape, parts=tuple(parts))

    def pieces(self, at: int, num_bytes: int) -> Sequence[tuple[Path, int, int]]:
        """(file, offset, bytes) of where `num_bytes` of the tensor lie, from its byte `at`."""
        found, begin = [], 0
        for run in self.runs:
            first, end = max(at, begin), min(at + num_bytes, begin + run.num_bytes)
            if end > first:
                found.append((run.file, run.offset_bytes + first - begin, end - first))
            begin += run.num_bytes
        return found


def read_bytes(source: TensorSource, name: str, at: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Some bytes of a tensor.

    Raises:
        StatedError: the file cannot be read or has become shorter.
    """
    found = [_read(file, offset, size, name) for file, offset, size in source.pieces(at, num_bytes)]
    return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint8), *found])


def _read(file: Path, offset: int, num_bytes: int, name: str) -> npt.NDArray[np.uint8]:
    try:
        data = np.fromfile(file, np.uint8, num_bytes, offset=offset)
    except OSError as error:
        raise StatedError(f"The weight file {file} cannot be read: {error.strerror or error}.") from error
    if data.size != num_bytes:
        raise StatedError(
            f"The weight file {file} ends within the tensor {name}: {data.size} bytes at {offset} where {num_bytes} are expected; "
            "it has changed since it was opened."
        )
    return data
