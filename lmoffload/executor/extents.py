"""Where the pieces of a unit lie in files, and where they come to lie in a buffer.

Pieces that touch or share pages in one file become one extent: one aligned read, mirrored in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmoffload_solver.schedule import PAGE_BYTES, Piece


class Source(Protocol):
    """The place of a tensor in the checkpoint."""

    @property
    def file(self) -> Path: ...
    @property
    def offset_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Extent:
    """`num_bytes` (whole pages) at `offset` of a file, to be read to `place` of a buffer."""

    file: Path
    offset: int
    num_bytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a unit's pieces fill a buffer: what to read, and the byte at which each piece then begins."""

    extents: tuple[Extent, ...]
    piece_places: tuple[int, ...]
    num_bytes: int


def lay_out(pieces: Sequence[Piece], sources: Sequence[Source], row_bytes: Sequence[int]) -> Layout:
    """Lay pieces out in a buffer, in the order of their places in the files; `piece_places` follows the order given."""
    begins = [source.offset_bytes + piece.first_row * size for piece, source, size in zip(pieces, sources, row_bytes, strict=True)]
    order = sorted(range(len(pieces)), key=lambda i: (str(sources[i].file), begins[i]))
    extents: list[Extent] = []
    places = [0] * len(pieces)
    used = 0
    for i in order:
        file, begin, end = sources[i].file, begins[i], begins[i] + pieces[i].num_bytes
        first_page, last_page = begin // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
        last = extents[-1] if extents else None
        if last is not None and last.file == file and first_page <= last.offset + last.num_bytes:
            last_page = max(last_page, last.offset + last.num_bytes)
            extents[-1] = Extent(file, last.offset, last_page - last.offset, last.place)
        else:
            extents.append(Extent(file, first_page, last_page - first_page, used))
        used = extents[-1].place + extents[-1].num_bytes
        places[i] = extents[-1].place + begin - extents[-1].offset
    return Layout(tuple(extents), tuple(places), used)
