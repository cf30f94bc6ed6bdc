"""The weights of a running plan without a device: resident ones in slabs, streamed ones in ring buffers."""

from __future__ import annotations

from lmoffload.executor.buffers import Slab
from lmoffload.executor.extents import Layout
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.stored_weights import StoredTensors, StoredWeights, num_rows
from lmoffload.kernels.matrix import Matrix
from lmoffload_solver.formats import stored_bytes
from lmoffload_solver.model import TensorShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import Piece, Unit, num_slots, slot_bytes


class WeightStore(StoredWeights):
    """Weights whose compute tier is host memory."""

    def __init__(self, tensors: StoredTensors, plan: Plan, units: tuple[Unit, ...], reader: DiskReader) -> None:
        super().__init__(tensors, reader)
        streaming = [unit for unit in units if unit.streamed]
        self.ring = [Slab(slot_bytes(units)) for _ in range(num_slots(units, plan.prefetch_depth))]
        self.layouts: dict[int, Layout] = {unit.index: self.lay_out(unit.streamed) for unit in streaming}
        for unit in streaming:
            assert self.layouts[unit.index].num_bytes <= slot_bytes(units)
        self._resident = self._load_resident(plan)
        self._table = self._resident.get(self._shape.embedding.name, ())

    @property
    def ring_bytes(self) -> int:
        return sum(slab.num_bytes for slab in self.ring)

    def bind(self, unit: Unit, slot: int | None) -> None:
        """Make the unit's streamed matrices, read into this ring buffer, the current ones."""
        self._current = {}
        if slot is not None:
            layout, buffer = self.layouts[unit.index], self.ring[slot]
            for piece, runs in zip(unit.streamed, layout.piece_runs, strict=True):
                self._current[piece.tensor] = self.matrices_in(buffer.bytes, piece, runs)
        if unit.kind == "head":
            name = self._shape.head.name
            (matrix,) = self._current[name] if slot is not None else self._resident[name]
            self._head = (matrix, unit.first_row, unit.end_row)

    def _load_resident(self, plan: Plan) -> dict[str, tuple[Matrix, ...]]:
        """Read every matrix with a home in memory, each file in the order of its bytes, one slab per decoder layer and one for the rest."""
        groups: dict[int | None, list[TensorShape]] = {}
        for tensor in self._shape.tensors:
            if tensor.is_matrix and plan.weights.tensors[tensor.name].tier != "disk":
                groups.setdefault(tensor.layer, []).append(tensor)
        resident: dict[str, tuple[Matrix, ...]] = {}
        for tensors in groups.values():
            pieces = [Piece(t.name, 0, num_rows(t), stored_bytes(t.shape, t.format)) for t in tensors]
            layout = self.lay_out(pieces)
            slab = Slab(layout.num_bytes)
            self._reader.read(layout.extents, slab)
            self.resident_bytes += sum(piece.num_bytes for piece in pieces)
            for piece, runs in zip(pieces, layout.piece_runs, strict=True):
                resident[piece.tensor] = self.matrices_in(slab.bytes, piece, runs)
        return resident
