"""Where the pieces of a unit lie in files, and where they come to lie in a buffer.

Pieces that touch or share pages in one file become one extent: one aligned read, mirrored in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmoffload_solver.schedule import PAGE_BYTES, Piece


class Run(Protocol):
    """Bytes of a tensor that lie together in a file."""

    @property
    def file(self) -> Path: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """`num_bytes` at `offset` of a file that are wanted in a buffer."""

    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """`num_bytes` (whole pages) at `offset` of a file, to be read to `place` of a buffer."""

    file: Path
    offset: int
    num_bytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a unit's pieces fill a buffer: what to read, and the byte at which each run of each piece then begins, and its size."""

    extents: tuple[Extent, ...]
    piece_runs: tuple[tuple[tuple[int, int], ...], ...]
    num_bytes: int


def stretches_of(piece: Piece, runs: Sequence[Run], row_bytes: int) -> list[Stretch]:
    """Where a piece lies: a tensor in one run may be cut, one in several is wanted whole."""
    if len(runs) == 1:
        return [Stretch(runs[0].file, runs[0].offset_bytes + piece.first_row * row_bytes, piece.num_bytes)]
    assert piece.first_row == 0 and piece.num_bytes == sum(run.num_bytes for run in runs), "a tensor in several runs is never cut"
    return [Stretch(run.file, run.offset_bytes, run.num_bytes) for run in runs]


def lay_out(pieces: Sequence[Sequence[Stretch]]) -> Layout:
    """Lay the stretches of pieces out in a buffer, in the order of their places in the files; `piece_runs` follows the order given."""
    stretches = [(stretch, i, j) for i, piece in enumerate(pieces) for j, stretch in enumerate(piece)]
    stretches.sort(key=lambda placed: (str(placed[0].file), placed[0].offset))
    extents: list[Extent] = []
    places = [[(0, 0)] * len(piece) for piece in pieces]
    used = 0
    for stretch, i, j in stretches:
        first_page = stretch.offset // PAGE_BYTES * PAGE_BYTES
        last_page = -(-(stretch.offset + stretch.num_bytes) // PAGE_BYTES) * PAGE_BYTES
        last = extents[-1] if extents else None
        if last is not None and last.file == stretch.file and first_page <= last.offset + last.num_bytes:
            last_page = max(last_page, last.offset + last.num_bytes)
            extents[-1] = Extent(last.file, last.offset, last_page - last.offset, last.place)
        else:
            extents.append(Extent(stretch.file, first_page, last_page - first_page, used))
        used = extents[-1].place + extents[-1].num_bytes
        places[i][j] = (extents[-1].place + stretch.offset - extents[-1].offset, stretch.num_bytes)
    return Layout(tuple(extents), tuple(tuple(runs) for runs in places), used)
