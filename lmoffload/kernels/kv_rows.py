"""Keys or values of some rows (sequences) at one layer, in one format: where they lie, storing new ones, and widening them again.

A row begins at its start (bytes) with its heads one after another. Per head,

* plain formats: [room, dim], token p at place p mod room;
* quantized keys: a ring of `room` groups of 32 tokens, group g at place g mod room, each with a line for every channel: all codes, then all
  parameters. Behind the ring the newest tokens, fewer than 32, as bf16 [32, dim]: a group is quantized when it is full;
* quantized values: for every 32 channels a panel of `room` lines, token p at place p mod room: all codes, then all parameters. The last
  panel is filled up with zeros.

Keys are rounded to bf16 before anything else, so that neither the step nor the chunk in which they come changes what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from lmoffload.kernels.codec import CODECS, Codec, encode_lines, reference_decode, unpack_codes
from lmoffload.kernels.pool import Pool
from lmoffload_solver.counting import key_group_bytes, key_head_bytes, num_lines, value_token_bytes
from lmoffload_solver.formats import LINE_ELEMENTS, PARAMETER_BYTES

Numbers = npt.NDArray[np.int64]
Found = TypeVar("Found")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEWEST = torch.bfloat16


@dataclass(slots=True)
class Memo:
    """What follows from rows and lengths alone, and so is the same at all layers that have as much room for as many heads."""

    found: Any = None


def recalled(memo: Memo | None, make: Callable[[], Found]) -> Found:
    """What was made before, or is made now."""
    if memo is None:
        return make()
    if memo.found is None:
        memo.found = make()
    return memo.found  # type: ignore[no-any-return]


class Run(NamedTuple):
    """Tokens [begin, end) of some packed ones that belong to a row, the first of them at position `first`, after all the row has."""

    row: int
    first: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class KVRows:
    """Memory that belongs to someone else. Which class stands for a format: `keys_of`, `values_of`.

    Attributes:
        format: a name of `lmoffload_solver.formats.KV_FORMATS`, or fp16.
        heads, dim: of keys or values.
        data: uint8, one-dimensional.
        starts: int64 [R], bytes.
        rooms: int64 [R], of each ring: tokens, or groups of quantized keys.
    """

    format: str
    heads: int
    dim: int
    data: torch.Tensor
    starts: Numbers
    rooms: Numbers

    def store_run(self, row: int, first: int, new: torch.Tensor, pool: Pool | None = None) -> None:
        """Store tokens of a row, the first of them at position `first`, after all before it: new floating [tokens, heads, dim]."""
        self.store_runs((Run(row, first, 0, new.shape[0]),), new, pool)

    def store_runs(self, runs: Sequence[Run], new: torch.Tensor, pool: Pool | None = None) -> None:
        """Store tokens of different rows: new floating [tokens, heads, dim]."""
        raise NotImplementedError

    def store_tokens(self, rows: Numbers, positions: Numbers, new: torch.Tensor) -> None:
        """Store one more token of each of `rows` at its position: new floating [R, heads, dim]."""
        raise NotImplementedError

    def touched(self, rows: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Where the bytes begin, and end, that `store_tokens` changes."""
        raise NotImplementedError

    def widened(self, row: int, first: int, end: int) -> torch.Tensor:
        """fp32 [heads, end - first, dim] of tokens first..end, `end` the row's length; in plain torch."""
        raise NotImplementedError


class PlainRows(KVRows):
    """Keys or values without blocks."""

    @property
    def lines(self) -> torch.Tensor:
        """[lines, dim]; a line is a token of a head."""
        return self.data.view(DTYPES[self.format]).view(-1, self.dim)

    def first_lines(self, rows: Numbers) -> Numbers:
        """[R]: the first line of each."""
        return self.starts[rows] // (self.dim * DTYPES[self.format].itemsize)

    def _mine(self, row: int) -> torch.Tensor:
        start, room = int(self.first_lines(np.array([row]))[0]), int(self.rooms[row])
        return self.lines[start : start + self.heads * room].view(self.heads, room, self.dim)

    def store_runs(self, runs: Sequence[Run], new: torch.Tensor, pool: Pool | None = None) -> None:
        for run in runs:
            count, room = run.end - run.begin, int(self.rooms[run.row])
            kept, end = min(count, room), run.first + count
            places = slice(run.first, end) if end <= room else torch.arange(end - kept, end) % room
            self._mine(run.row)[:, places] = new[run.end - kept : run.end].transpose(0, 1).to(DTYPES[self.format])

    def store_tokens(self, rows: Numbers, positions: Numbers, new: torch.Tensor) -> None:
        self.lines[torch.from_numpy(self._places(rows, positions))] = new.reshape(-1, self.dim).to(DTYPES[self.format])

    def touched(self, rows: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
        line, index = self.dim * DTYPES[self.format].itemsize, self._places(rows, positions)
        return index * line, (index + 1) * line

    def _places(self, rows: Numbers, positions: Numbers) -> Numbers:
        """[R * heads], lines."""
        rooms = self.rooms[rows]
        index: Numbers = (self.first_lines(rows) + positions % rooms)[:, None] + np.arange(self.heads)[None, :] * rooms[:, None]
        return index.reshape(-1)

    def widened(self, row: int, first: int, end: int) -> torch.Tensor:
        return self._mine(row)[:, torch.arange(first, end) % int(self.rooms[row])].float()


class GroupedKeys(KVRows):
    """Quantized keys."""

    @property
    def _codec(self) -> Codec:
        return CODECS[self.format]

    @property
    def _group_bytes(self) -> int:
        return key_group_bytes(self.dim, self.format)

    def _head_starts(self, rows: Numbers) -> Numbers:
        """[R, heads], bytes."""
        sizes = np.array([key_head_bytes(self.dim, int(room), self.format) for room in self.rooms[rows]], dtype=np.int64)
        return self.starts[rows][:, None] + np.arange(self.heads) * sizes[:, None]

    def _newest(self, rows: Numbers) -> Numbers:
        """[R, heads]: the first line of the newest tokens, in lines of dim bf16."""
        begin = self._head_starts(rows) + self.rooms[rows][:, None] * self._group_bytes
        return begin // (self.dim * NEWEST.itemsize)

    @property
    def _newest_lines(self) -> torch.Tensor:
        return self.data.view(NEWEST).view(-1, self.dim)

    def store_runs(self, runs: Sequence[Run], new: torch.Tensor, pool: Pool | None = None) -> None:
        for run in runs:
            if run.first % LINE_ELEMENTS:
                self._go_on(run.row, run.first, new[run.begin : run.end], pool)
        whole = np.array([run for run in runs if run.first % LINE_ELEMENTS == 0], dtype=np.int64).reshape(-1, len(Run._fields))
        rows, firsts, begins, ends = whole.T
        full, keys = (ends - begins) // LINE_ELEMENTS, new.to(NEWEST)
        rest = begins + full * LINE_ELEMENTS
        of, place = _within(ends - rest)
        lines = torch.from_numpy((self._newest(rows)[of] + place[:, None]).reshape(-1))
        self._newest_lines[lines] = keys[_rows(rest[of] + place)].reshape(-1, self.dim)
        kept = np.minimum(full, self.rooms[rows])
        of, place = _within(kept)
        if len(of):
            number = (full - kept)[of] + place
            tokens = (begins[of] + number * LINE_ELEMENTS)[:, None] + np.arange(LINE_ELEMENTS)
            groups = keys[_rows(tokens.reshape(-1))].view(len(of), LINE_ELEMENTS, self.heads, self.dim).transpose(1, 2).unsqueeze(2)
            self._store_groups(rows[of], (firsts[of] // LINE_ELEMENTS + number)[:, None], groups, pool)

    def _go_on(self, row: int, first: int, new: torch.Tensor, pool: Pool | None) -> None:
        """Store a run that begins within a group: with what the group has already, it begins where the group does."""
        known = first % LINE_ELEMENTS
        held = [self._newest_lines[begin : begin + known] for begin in self._newest(np.array([row]))[0].tolist()]
        keys = torch.cat((torch.stack(held).transpose(0, 1), new.to(NEWEST)))
        self.store_runs((Run(row, first - known, 0, keys.shape[0]),), keys, pool)

    def store_tokens(self, rows: Numbers, positions: Numbers, new: torch.Tensor) -> None:
        lines, full = self._newest_lines, positions % LINE_ELEMENTS == LINE_ELEMENTS - 1
        places = (self._newest(rows) + (positions % LINE_ELEMENTS)[:, None]).reshape(-1)
        lines[torch.from_numpy(places)] = new.reshape(-1, self.dim).to(NEWEST)
        if full.any():
            index = self._newest(rows)[full][:, :, None] + np.arange(LINE_ELEMENTS)
            groups = lines[torch.from_numpy(index.reshape(-1))].view(-1, self.heads, 1, LINE_ELEMENTS, self.dim)
            self._store_groups(rows[full], (positions[full] // LINE_ELEMENTS)[:, None], groups, None)

    def touched(self, rows: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
        line = self.dim * NEWEST.itemsize
        newest = (self._newest(rows) + (positions % LINE_ELEMENTS)[:, None]).reshape(-1) * line
        full = positions % LINE_ELEMENTS == LINE_ELEMENTS - 1
        numbers = positions[full] // LINE_ELEMENTS % np.maximum(self.rooms[rows[full]], 1)
        groups = (self._head_starts(rows[full]) + numbers[:, None] * self._group_bytes).reshape(-1)
        return np.concatenate((newest, groups)), np.concatenate((newest + line, groups + self._group_bytes))

    def _store_groups(self, rows: Numbers, numbers: Numbers, groups: torch.Tensor, pool: Pool | None) -> None:
        """Quantize groups bf16 [R, heads, G, 32, dim] with numbers [R, G]."""
        lines = groups.transpose(3, 4).float().contiguous()
        places = self._head_starts(rows)[:, :, None] + (numbers % self.rooms[rows][:, None])[:, None, :] * self._group_bytes
        codes = places[..., None] + np.arange(self.dim) * self._codec.line_bytes
        parameters = places[..., None] + self.dim * self._codec.line_bytes + np.arange(self.dim) * PARAMETER_BYTES
        code_places, parameter_places = (torch.from_numpy(each.reshape(-1)) for each in (codes, parameters))
        encode_lines(lines.view(-1, LINE_ELEMENTS), self.format, self.data, code_places, parameter_places, pool)

    def widened(self, row: int, first: int, end: int) -> torch.Tensor:
        one, whole = np.array([row]), end // LINE_ELEMENTS
        found = []
        for head, newest in zip(self._head_starts(one)[0].tolist(), self._newest(one)[0].tolist(), strict=True):
            groups = [self._group(head, group, int(self.rooms[row])) for group in range(first // LINE_ELEMENTS, whole)]
            rest = self._newest_lines[newest : newest + end % LINE_ELEMENTS].float()
            found.append(torch.cat((*groups, rest))[first % LINE_ELEMENTS :])
        return torch.stack(found)

    def _group(self, head_start: int, number: int, room: int) -> torch.Tensor:
        """fp32 [32, dim]."""
        start, line_bytes = head_start + number % room * self._group_bytes, self._codec.line_bytes
        stored = self.data[start : start + self._group_bytes].clone()
        codes = unpack_codes(stored[: self.dim * line_bytes].view(self.dim, line_bytes), self.format)
        return reference_decode(codes, stored[self.dim * line_bytes :].view(torch.int32)).transpose(0, 1)


class PanelValues(KVRows):
    """Quantized values."""

    @property
    def _codec(self) -> Codec:
        return CODECS[self.format]

    def _places(self, rows: Numbers, positions: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes' and parameters' places of tokens [T] of rows [T]: [T · heads · panels]."""
        panels, line_bytes = num_lines(self.dim), self._codec.line_bytes
        rooms = self.rooms[rows][:, None]
        panel_bytes = rooms * (line_bytes + PARAMETER_BYTES)
        begin = self.starts[rows][:, None] + np.arange(self.heads * panels) * panel_bytes
        place = positions[:, None] % rooms
        codes, parameters = begin + place * line_bytes, begin + rooms * line_bytes + place * PARAMETER_BYTES
        return torch.from_numpy(codes.reshape(-1)), torch.from_numpy(parameters.reshape(-1))

    def touched(self, rows: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
        codes, parameters = (places.numpy() for places in self._places(rows, positions))
        begins = np.concatenate((codes, parameters))
        return begins, np.concatenate((codes + self._codec.line_bytes, parameters + PARAMETER_BYTES))

    def _encode(self, places: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor, pool: Pool | None) -> None:
        """Tokens [T, heads, dim]."""
        filled = new.float()
        if self.dim % LINE_ELEMENTS:
            filled = functional.pad(filled, (0, -self.dim % LINE_ELEMENTS))
        encode_lines(filled.contiguous().view(-1, LINE_ELEMENTS), self.format, self.data, *places, pool)

    def store_runs(self, runs: Sequence[Run], new: torch.Tensor, pool: Pool | None = None) -> None:
        rows, firsts, begins, ends = np.array(runs, dtype=np.int64).reshape(-1, len(Run._fields)).T
        kept = np.minimum(ends - begins, self.rooms[rows])
        of, place = _within(kept)
        tokens = (ends - kept)[of] + place
        self._encode(self._places(rows[of], (firsts - begins)[of] + tokens), new[_rows(tokens)], pool)

    def store_tokens(self, rows: Numbers, positions: Numbers, new: torch.Tensor) -> None:
        self._encode(self._places(rows, positions), new, None)

    def widened(self, row: int, first: int, end: int) -> torch.Tensor:
        codes, parameters = self._places(np.full(end - first, row), np.arange(first, end))
        line_bytes = self._codec.line_bytes
        stored = self.data[codes[:, None] + torch.arange(line_bytes)]
        both = self.data[parameters[:, None] + torch.arange(PARAMETER_BYTES)].view(torch.int32)[:, 0]
        wide = reference_decode(unpack_codes(stored, self.format), both)
        return wide.view(end - first, self.heads, -1)[..., : self.dim].transpose(0, 1)


def _within(counts: Numbers) -> tuple[Numbers, Numbers]:
    """Of so many things each: whose each one is, and its number among them."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)


def _rows(index: Numbers) -> slice | torch.Tensor:
    """For indexing: a slice, which copies nothing, where they follow one another."""
    if len(index) and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


def keys_of(format_name: str, heads: int, dim: int, data: torch.Tensor, starts: Numbers, rooms: Numbers) -> KVRows:
    """Keys in a format."""
    kind = GroupedKeys if format_name in CODECS else PlainRows
    return kind(_known(format_name), heads, dim, data, starts, rooms)


def values_of(format_name: str, heads: int, dim: int, data: torch.Tensor, starts: Numbers, rooms: Numbers) -> KVRows:
    """Values in a format."""
    kind = PanelValues if format_name in CODECS else PlainRows
    return kind(_known(format_name), heads, dim, data, starts, rooms)


def row_bytes(rows: KVRows, room: int) -> int:
    """Bytes of one row."""
    if isinstance(rows, GroupedKeys):
        return rows.heads * key_head_bytes(rows.dim, room, rows.format)
    return rows.heads * room * value_token_bytes(rows.dim, rows.format)


def _known(format_name: str) -> str:
    assert format_name in DTYPES or format_name in CODECS, f"nobody attends to {format_name}"
    return format_name
