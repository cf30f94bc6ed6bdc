"""The stored weights of a running plan: matrices of buffers, the one that computes now, table rows looked up."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.extents import Layout, Run, lay_out, stretches_of
from lmoffload.executor.reader import DiskReader
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.quantize import dequantize
from lmoffload.kernels.tiled import is_tiled, padded_tail, taken
from lmoffload_solver.formats import format_of, stored_bytes
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.schedule import Piece

TABLE_ROWS_AT_ONCE = 1024
"""Rows of the embedding table that are widened at a time."""

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class StoredSource(Run, Protocol):
    """The place of a tensor, with the order of its rows where the file keeps them in another; as one run, or in several of equal size."""

    @property
    def row_order(self) -> np.ndarray | None: ...
    @property
    def runs(self) -> Sequence[Run]: ...


class StoredTensors(Protocol):
    """What the executor asks of a checkpoint."""

    @property
    def shape(self) -> ModelShape: ...
    def source(self, name: str) -> StoredSource: ...
    def read_array(self, name: str) -> np.ndarray: ...


class StoredWeights:
    """Finds the matrices of the unit that computes now. Where they lie is said by the classes below this one."""

    def __init__(self, tensors: StoredTensors, reader: DiskReader) -> None:
        self._tensors = tensors
        self._shape = tensors.shape
        self._reader = reader
        self._row_orders = {t.name: self._row_order(t) for t in self._shape.tensors if t.is_matrix}
        self._resident: dict[str, tuple[Matrix, ...]] = {}
        """Those that lie in the compute tier for the whole run."""
        self._current: dict[str, tuple[Matrix, ...]] = {}
        self._head: tuple[Matrix, int, int] | None = None
        self.resident_bytes = 0
        """Stored bytes of the matrices in memory."""
        self._table: tuple[Matrix, ...] = ()
        """The embedding table, in runs of as many rows but the last, unless its home is the disk."""
        self.vectors = {t.name: self._mapped(t) if t.is_table else self._widened(t) for t in self._shape.tensors if not t.is_matrix}

    @property
    def vector_bytes(self) -> int:
        """Stored bytes of the resident tensors that are no matrices; in memory they are fp32."""
        return sum(stored_bytes(t.shape, t.format) for t in self._shape.tensors if not t.is_matrix and not t.is_table)

    def matrix(self, name: str) -> Matrix:
        """The whole matrix of a parameter, resident or in the current ring buffer."""
        (found,) = self._runs(name)
        return found

    def stays(self, name: str) -> bool:
        """Whether a parameter's matrix lies in the compute tier for the whole run."""
        return name in self._resident

    def expert(self, name: str, index: int) -> tuple[Matrix, ...]:
        """The matrix of one expert of a parameter, or those that its rows are split into."""
        shape = self._shape.by_name[name].shape
        runs, first = self._runs(name), index * shape[-2]
        height, end = runs[0].n, first + shape[-2]
        return tuple(
            runs[i].rows(max(first - i * height, 0), min(end - i * height, height)) for i in range(first // height, -(-end // height))
        )

    def _runs(self, name: str) -> tuple[Matrix, ...]:
        found = self._resident.get(name) or self._current.get(name)
        assert found is not None, f"{name} is neither resident nor in the current buffer"
        return found

    def head_piece(self, unit: int) -> tuple[Matrix, int, int]:
        """(matrix, first_row, end_row) of the head rows that `unit` computes."""
        assert self._head is not None
        return self._head

    def table_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Rows of the token embedding table, [len(token_ids), hidden] fp32, from memory or by direct reads of just those rows.

        Where rows are stored in tiles, whole tiles are read, a few at a time.
        """
        table = self._shape.embedding
        tile = format_of(table.format).tile_rows
        ids = np.asarray(token_ids, dtype=np.int64)
        out, whole = torch.empty(len(ids), table.shape[-1]), num_rows(table) // tile * tile
        if tile > 1 and len(self._table) == 1 and ids.max(initial=0) < whole:
            held, chosen = self._table[0].data[: whole * self._table[0].row_bytes], torch.from_numpy(ids)
            for some, place in zip(torch.split(chosen, TABLE_ROWS_AT_ONCE), torch.split(out, TABLE_ROWS_AT_ONCE), strict=True):
                place.copy_(dequantize(taken(held, table.format, table.shape[-1], some)))
            return out
        wanted = np.unique(ids // tile)  # only the table's last tile is short, and it comes last
        at_once = max(1, TABLE_ROWS_AT_ONCE // tile)
        for first in range(0, len(wanted), at_once):
            tiles = wanted[first : first + at_once]
            places = np.flatnonzero((ids // tile >= tiles[0]) & (ids // tile <= tiles[-1]))
            rows = np.searchsorted(tiles, ids[places] // tile) * tile + ids[places] % tile
            out[torch.from_numpy(places)] = self._widened_rows(table, tiles, tile, torch.from_numpy(rows))
        return out

    def _widened_rows(self, table: TensorShape, tiles: np.ndarray, tile: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows of those that the tiles hold."""
        ranges = [(int(i) * tile, min(int(i + 1) * tile, num_rows(table))) for i in tiles]
        if self._table:
            height = self._table[0].n
            data = [
                self._table[first // height].rows(first % height, first % height + end - first).data for first, end in ranges
            ]
        else:
            data = self._rows_on_disk(table, ranges)
        k, last = table.shape[-1], ranges[-1][1] - ranges[-1][0]
        if not is_tiled(table.format):
            return reference_widen(Matrix(torch.cat(data).cpu(), table.format, sum(end - first for first, end in ranges), k))[rows]
        if last < tile:
            data[-1] = padded_tail(data[-1], table.format, last, k)
        return dequantize(taken(torch.cat(data).cpu(), table.format, k, rows))

    def _rows_on_disk(self, table: TensorShape, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        row_bytes = stored_bytes(table.shape[-1:], table.format)
        pieces = [Piece(table.name, first, end, (end - first) * row_bytes) for first, end in ranges]
        layout = self.lay_out(pieces)
        buffer = Slab(layout.num_bytes)
        self._reader.read(layout.extents, buffer)
        return [buffer.bytes[place : place + num_bytes] for ((place, num_bytes),) in layout.piece_runs]

    def lay_out(self, pieces: Sequence[Piece]) -> Layout:
        """How pieces fill a buffer that their files are read into."""
        return lay_out(
            [stretches_of(p, self._tensors.source(p.tensor).runs, p.num_bytes // (p.end_row - p.first_row)) for p in pieces]
        )

    def matrices_in(self, memory: torch.Tensor, piece: Piece, runs: Sequence[tuple[int, int]]) -> tuple[Matrix, ...]:
        """The runs of a piece in a buffer, as matrices of its rows."""
        tensor, order = self._shape.by_name[piece.tensor], self._row_orders[piece.tensor]
        assert order is None or (piece.first_row, piece.end_row) == (0, num_rows(tensor)), "a permuted matrix is never cut"
        rows = (piece.end_row - piece.first_row) // len(runs)
        return tuple(Matrix(memory[place : place + size], tensor.format, rows, tensor.shape[-1], order) for place, size in runs)

    def _row_order(self, tensor: TensorShape) -> torch.Tensor | None:
        order = self._tensors.source(tensor.name).row_order
        return None if order is None else torch.from_numpy(np.ascontiguousarray(order))

    def _mapped(self, tensor: TensorShape) -> torch.Tensor:
        """A table in its stored precision, its rows read from the file as they are looked up."""
        source = self._tensors.source(tensor.name)
        size = stored_bytes(tensor.shape, tensor.format)
        raw = np.memmap(source.file, np.uint8, "r", source.offset_bytes, (size,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the mapping is read-only, and so is every use of it
            return torch.from_numpy(raw).view(TORCH_DTYPES[tensor.format]).view(tensor.shape)

    def _widened(self, tensor: TensorShape) -> torch.Tensor:
        raw = torch.from_numpy(np.array(self._tensors.read_array(tensor.name), dtype=np.uint8, copy=True).reshape(-1))
        columns = tensor.shape[-1] if tensor.shape else 1
        order = self._row_orders.get(tensor.name) if tensor.name in self._row_orders else self._row_order(tensor)
        matrix = Matrix(raw, tensor.format, num_rows(tensor), columns, order if len(tensor.shape) > 1 else None)
        widened = reference_widen(matrix).reshape(tensor.shape)
        return widened[order] if order is not None and len(tensor.shape) == 1 else widened


def num_rows(tensor: TensorShape) -> int:
    """Rows of a matrix, all leading dimensions flattened."""
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    return rows
