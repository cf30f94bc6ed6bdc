"""The tokens of one step of a micro-batch, row after row, cut into the chunks that are computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from lmoffload.kernels.prefill import QUERY_BLOCK


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [first, end) of a row."""

    row: int
    first: int
    end: int
    last: bool
    """It ends with the row's newest token."""


@dataclass(frozen=True)
class Packed:
    """The tokens of one chunk, those of all its pieces one after another, padded at the end."""

    pieces: tuple[Piece, ...]
    token_ids: list[int]
    positions: list[int]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Tokens [begin, end) of each piece."""
        edges = accumulate((piece.end - piece.first for piece in self.pieces), initial=0)
        return list(pairwise(edges))

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(tokens before the piece, tokens with it) of each row."""
        return tuple((piece.first, piece.end) for piece in self.pieces)

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        return np.asarray([piece.row for piece in self.pieces], dtype=np.int64)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row with those of its piece."""
        return np.asarray([piece.end for piece in self.pieces], dtype=np.int64)

    @property
    def newest(self) -> list[int]:
        """Places of the rows' newest tokens."""
        return [end - 1 for piece, (_, end) in zip(self.pieces, self.segments, strict=True) if piece.last]


def pack_prompts(rows: Sequence[int], tokens: Sequence[Sequence[int]], chunk: int | None, multiple: int) -> list[Packed]:
    """Whole prompts in chunks of at most `chunk` tokens (None: one chunk), each padded to a multiple."""
    lengths = [len(tokens[row]) for row in rows]
    return [_packed(pieces, tokens, multiple) for pieces in _chunks(rows, lengths, chunk)]


def pack_newest(rows: Sequence[int], tokens: Sequence[Sequence[int]], multiple: int) -> Packed:
    """The newest token of every row."""
    return _packed([Piece(row, len(tokens[row]) - 1, len(tokens[row]), True) for row in rows], tokens, multiple)


def _packed(pieces: Sequence[Piece], tokens: Sequence[Sequence[int]], multiple: int) -> Packed:
    ids = [token for piece in pieces for token in tokens[piece.row][piece.first : piece.end]]
    positions = [place for piece in pieces for place in range(piece.first, piece.end)]
    padding = [0] * (-len(ids) % multiple)
    return Packed(tuple(pieces), ids + padding, positions + padding)


def _chunks(rows: Sequence[int], lengths: Sequence[int], chunk: int | None) -> Iterator[list[Piece]]:
    """Rows are cut at whole blocks of queries: attention then computes the same blocks, hence the same bits, as over the whole prompt."""
    most = sum(lengths) if chunk is None else max(chunk, QUERY_BLOCK)
    pieces: list[Piece] = []
    room = most
    for row, length in zip(rows, lengths, strict=True):
        first = 0
        while first < length:
            end = length if length - first <= room else first + room // QUERY_BLOCK * QUERY_BLOCK
            if end > first:
                pieces.append(Piece(row, first, end, end == length))
            room -= end - first
            first = end
            if first < length:
                yield pieces
                pieces, room = [], most
    yield pieces
