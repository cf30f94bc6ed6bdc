"""The weights of a plan with a device: at home on the device, or moved up unit by unit from the host and, through a staging buffer, from
the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.extents import Extent, Layout
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.resources import Accelerator
from lmoffload.executor.stored_weights import StoredTensors, StoredWeights, num_rows
from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.processor import Processor
from lmoffload_solver.chain_schedule import Share
from lmoffload_solver.formats import stored_bytes
from lmoffload_solver.model import TensorShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import PAGE_BYTES, Piece, Unit
from lmoffload_solver.value import Tier


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of a run of a matrix: where they lie in a buffer on the host, and in the device's."""

    source: int
    num_bytes: int
    target: int


@dataclass(frozen=True)
class Passage:
    """How what a unit has on the host, and on the disk, comes to lie in a buffer of the device."""

    host: Slab | None
    host_bytes: int
    host_moves: tuple[Move, ...]
    disk: Layout
    disk_moves: tuple[Move, ...]
    places: Mapping[str, tuple[tuple[int, int], ...]]
    """Of each matrix, where its runs begin in the device's buffer, and their sizes."""
    num_bytes: int
    """In the device's buffer."""


class TieredWeights(StoredWeights):
    """Weights of a plan whose compute tier is a device.

    Args:
        here: what is computed on this device; the units, and tensors, of other devices are theirs.
        num_buffers: buffers on the device, and as many on the host, that units pass through in turn.

    Raises:
        StatedError: the device's memory does not hold them.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        plan: Plan,
        units: tuple[Unit, ...],
        reader: DiskReader,
        accelerator: Accelerator,
        processor: Processor,
        num_buffers: int,
        here: range,
    ) -> None:
        super().__init__(tensors, reader)
        self._accelerator, self._units = accelerator, units[here.start : here.stop]
        self._layers, self._is_last = here, here.stop == len(units)
        self._tiers: dict[str, Tier] = {name: planned.tier for name, planned in plan.weights.tensors.items()}
        for name, vector in self.vectors.items():
            if not self._shape.by_name[name].is_table:
                self.vectors[name] = vector.to(processor.device, processor.dtype)
        accelerator.memory.charge(self.device_vector_bytes, "vectors")
        self.home_bytes: dict[Tier, int] = {"device": 0, "host": 0}
        for names in self._groups():
            self._load_home(names)
        self.passages = {unit.index: self._passage(unit, self._on_host(unit)) for unit in self._units if unit.streamed}
        slot = max((passage.num_bytes for passage in self.passages.values()), default=0)
        staged = max((passage.disk.num_bytes for passage in self.passages.values()), default=0)
        count = num_buffers if slot else 0
        self.slots = [accelerator.memory.allocate(slot, "buffers of weights") for _ in range(count)]
        self.staging = [accelerator.page_locked(staged) for _ in range(count if staged else 0)]
        self._load_table()
        self.resident_bytes = sum(self.home_bytes.values())
        self._bound: dict[tuple[int, int], dict[str, tuple[Matrix, ...]]] = {}

    @property
    def device_vector_bytes(self) -> int:
        """Bytes of the tensors that are no matrices, as they lie on the device: in the dtype of its activations."""
        return sum(value.numel() * value.element_size() for name, value in self.vectors.items() if not self._shape.by_name[name].is_table)

    def read(self, unit: int, number: int, share: Share) -> None:
        """Read a share of what a unit has on the disk into the staging buffer of use `number`; a task of the disk."""
        first, end = _disk_share(self.passages[unit].disk, share)
        extents = tuple(_clipped(self.passages[unit].disk.extents, first, end))
        if extents:
            self._reader.read(extents, self.staging[number % len(self.staging)])

    def upload(self, unit: int, number: int, share: Share) -> None:
        """Move a share of a unit up, into the buffer of use `number`; a task of the upload."""
        passage, slot = self.passages[unit], self.slots[number % len(self.slots)]
        index, of = share
        if passage.host is not None:
            host_first, host_end = passage.host_bytes * index // of, passage.host_bytes * (index + 1) // of
            self._move(passage.host_moves, passage.host, slot, host_first, host_end)
        if passage.disk_moves:
            self._move(passage.disk_moves, self.staging[number % len(self.staging)], slot, *_disk_share(passage.disk, share))

    def bind(self, unit: Unit, number: int) -> None:
        """Make the matrices of a unit, whose buffer is that of use `number`, the current ones."""
        self._current = {}
        if unit.streamed:
            slot = number % len(self.slots)
            if (unit.index, slot) not in self._bound:
                self._bound[unit.index, slot] = self._in_slot(unit, self.slots[slot])
            self._current = self._bound[unit.index, slot]
        if unit.kind == "head":
            matrix = self.matrix(self._shape.head.name)
            self._head = (matrix, unit.first_row, unit.end_row)

    def _in_slot(self, unit: Unit, slot: torch.Tensor) -> dict[str, tuple[Matrix, ...]]:
        places = self.passages[unit.index].places
        return {piece.tensor: self.matrices_in(slot, piece, places[piece.tensor]) for piece in unit.streamed}

    def _move(self, moves: Sequence[Move], source: Slab, slot: torch.Tensor, first: int, end: int) -> None:
        for move in moves:
            begin, stop = max(move.source, first), min(move.source + move.num_bytes, end)
            if begin < stop:
                target = move.target + begin - move.source
                self._accelerator.to_device(slot[target : target + stop - begin], source.bytes[begin:stop])

    def _groups(self) -> list[list[TensorShape]]:
        """Matrices at home on the device that lie in one allocation: a layer's, and the others."""
        groups: dict[int | None, list[TensorShape]] = {}
        for tensor in self._shape.tensors:
            if tensor.is_matrix and self._tiers[tensor.name] == "device" and self._is_here(tensor):
                groups.setdefault(tensor.layer, []).append(tensor)
        return list(groups.values())

    def _is_here(self, tensor: TensorShape) -> bool:
        """What belongs to no layer is the last device's."""
        return self._is_last if tensor.layer is None else tensor.layer in self._layers

    def _load_home(self, tensors: Sequence[TensorShape]) -> None:
        pieces = [_piece(tensor) for tensor in tensors]
        layout = self.lay_out(pieces)
        slab = Slab(layout.num_bytes)
        self._reader.read(layout.extents, slab)
        memory = self._accelerator.memory.allocate(sum(piece.num_bytes for piece in pieces), "weights")
        used = 0
        for piece, runs in zip(pieces, layout.piece_runs, strict=True):
            packed = []
            for place, size in runs:
                memory[used : used + size].copy_(slab.bytes[place : place + size])
                packed.append((used, size))
                used += size
            self._resident[piece.tensor] = self.matrices_in(memory, piece, packed)
        self.home_bytes["device"] += used

    def _on_host(self, unit: Unit) -> tuple[Slab, Layout] | None:
        """What a unit has at home on the host."""
        pieces = self._pieces(unit, "host")
        if not pieces:
            return None
        self.home_bytes["host"] += sum(piece.num_bytes for piece in pieces)
        return self._read(pieces)

    def _passage(self, unit: Unit, on_host: tuple[Slab, Layout] | None) -> Passage:
        from_disk = self._pieces(unit, "disk")
        disk = self.lay_out(from_disk)
        places: dict[str, tuple[tuple[int, int], ...]] = {}
        used = 0

        def moves(pieces: Sequence[Piece], layout: Layout) -> tuple[Move, ...]:
            nonlocal used
            found = []
            for piece, runs in zip(pieces, layout.piece_runs, strict=True):
                begin = used
                for place, size in runs:
                    found.append(Move(place, size, used))
                    used += size
                places[piece.tensor] = tuple((begin + size * i, size) for i, (_, size) in enumerate(runs))
            return tuple(found)

        host_moves = () if on_host is None else moves(self._pieces(unit, "host"), on_host[1])
        disk_moves = moves(from_disk, disk)
        slab, host_bytes = (None, 0) if on_host is None else (on_host[0], on_host[1].num_bytes)
        return Passage(slab, host_bytes, host_moves, disk, disk_moves, places, used)

    def _pieces(self, unit: Unit, tier: Tier) -> list[Piece]:
        return [piece for piece in unit.streamed if self._tiers[piece.tensor] == tier]

    def _load_table(self) -> None:
        """Find where rows of the embedding table are looked up. A table that is the output head, at home on the host, lies there in the
        pieces that go up."""
        table = self._shape.embedding
        if not self._is_here(table):
            return
        if self._tiers[table.name] == "device":
            self._table = self._resident[table.name]
        elif self._tiers[table.name] == "host":
            pieces = [(unit, piece) for unit in self._units for piece in unit.streamed if piece.tensor == table.name]
            if not pieces:
                slab, layout = self._read([_piece(table)])
                self._table = self.matrices_in(slab.bytes, _piece(table), layout.piece_runs[0])
                self.home_bytes["host"] += _piece(table).num_bytes
                return
            found: list[Matrix] = []
            for unit, piece in pieces:
                passage = self.passages[unit.index]
                assert passage.host is not None
                runs = tuple((move.source, move.num_bytes) for move in passage.host_moves)
                found += self.matrices_in(passage.host.bytes, piece, runs)
            self._table = tuple(found)

    def _read(self, pieces: Sequence[Piece]) -> tuple[Slab, Layout]:
        """Pieces, read into memory of the host that the copies reach."""
        layout = self.lay_out(pieces)
        slab = self._accelerator.page_locked(layout.num_bytes)
        self._reader.read(layout.extents, slab)
        return slab, layout


def _piece(tensor: TensorShape) -> Piece:
    return Piece(tensor.name, 0, num_rows(tensor), stored_bytes(tensor.shape, tensor.format), tensor.num_runs)


def _disk_share(layout: Layout, share: Share) -> tuple[int, int]:
    """Bytes [first, end) of a staging buffer that a share is: whole pages."""
    index, of = share
    pages = layout.num_bytes // PAGE_BYTES
    return pages * index // of * PAGE_BYTES, pages * (index + 1) // of * PAGE_BYTES


def _clipped(extents: Sequence[Extent], first: int, end: int) -> Iterator[Extent]:
    for extent in extents:
        begin, stop = max(extent.place, first), min(extent.place + extent.num_bytes, end)
        if begin < stop:
            yield Extent(extent.file, extent.offset + begin - extent.place, stop - begin, begin)

