"""The task graph of a plan: one schedule, two interpreters.

`units_of` cuts the model into the units that are computed between two switches of micro-batch: the embedding, each decoder layer, and the
output head (in pieces no larger than a layer when it is streamed); where memory is tight, a layer is cut at each matrix that streams.
`block_tasks` generates the zig-zag block lazily: for each step, for each unit, for every micro-batch, so that one weight load serves all.
`simulate` walks the tasks with predicted seconds, the executor runs them.

Resources are serial servers that take their tasks in graph order, so the simulated time is a max-plus recurrence over this graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise, takewhile
from types import MappingProxyType
from typing import Literal

from lmoffload_solver.formats import format_of, stored_bytes
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import Kind, Resource

PAGE_BYTES = 4096
"""Direct reads start and end on multiples of this; a stored tensor is read as its aligned superset."""

READ_REQUEST_BYTES = 4 * 2**20
"""Largest single request to a disk; a unit's read is cut into requests of this size, several in flight."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first_row, end_row) of a streamed matrix (of all its leading dimensions flattened)."""

    tensor: str
    first_row: int
    end_row: int
    num_bytes: int
    num_runs: int = 1
    """In how many places of its files it lies at most, in equal parts."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What one micro-batch computes between two switches, and what must be read for it."""

    index: int
    kind: Literal["embed", "layer", "part", "head"]
    """A "layer" begins a decoder layer; a "part" goes on in one at its streamed matrix (`Plan.stream` "matrix")."""
    layer: int | None
    streamed: tuple[Piece, ...]
    first_row: int = 0
    end_row: int = 0
    """Rows of the output head that this unit computes."""
    computes: tuple[str, ...] = ()
    """Matrices of the layer whose products fall into this unit, in order, resident ones included."""

    @property
    def streamed_bytes(self) -> int:
        """Stored bytes moved for this unit."""
        return sum(piece.num_bytes for piece in self.streamed)

    @property
    def slot_bytes(self) -> int:
        """Buffer bytes reserved for this unit: every piece as its aligned superset."""
        return sum(aligned_bytes(piece.num_bytes, piece.num_runs) for piece in self.streamed)


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Its amount is bytes for a transfer; a compute task's amount follows from its unit, micro-batch and step."""

    index: int
    kind: Kind
    step: int
    """0 is the prefill, i the i-th decode step."""
    unit: int
    micro_batch: int | None
    resource: Resource
    num_bytes: int
    depends_on: tuple[int, ...]
    slot: int | None = None
    """Ring buffer that the task fills (read_weights) or uses (compute)."""
    kv_slot: int | None = None
    """Staging buffer that the task fills (load_kv), uses (compute) or empties (store_kv)."""
    stage: int = 0
    """Accelerator whose resource it is, where there are several."""


@dataclass(frozen=True, slots=True)
class Spilled:
    """Keys and values of a (layer, micro-batch) whose home is the disk."""

    num_bytes: int
    """All of them, in whole pages."""
    step_bytes: int
    """What a decode step's new tokens make to be written, at most."""
    step_writes: int
    """In how many writes."""


STORE_GAP_BYTES = 64 * 2**10
"""Stored along where so few unchanged bytes lie between two changed pages."""

STAGING_BUFFERS = 2
"""Keys and values on the disk pass through so many buffers, taken in turn: one is computed from while the next is filled."""


def aligned_bytes(num_bytes: int, num_runs: int = 1) -> int:
    """Largest aligned superset of `num_bytes` stored at any offset, in `num_runs` equal parts: whole pages that touch them."""
    return num_runs * ((num_bytes // num_runs + 2 * PAGE_BYTES - 2) // PAGE_BYTES * PAGE_BYTES)


def units_of(model: ModelShape, plan: Plan) -> tuple[Unit, ...]:
    """The units of a step, in order of computation. Tensors whose home is "disk" are streamed; the embedding table is read row by row
    where it is looked up, and streams only as the output head."""
    on_disk = {name for name, tensor in plan.weights.tensors.items() if tensor.tier == "disk"}
    units = [Unit(0, "embed", None, ())]
    for layer in range(model.num_layers):
        matrices = [t.name for t in model.by_layer[layer] if t.is_matrix]
        pieces = {name: _whole(model.by_name[name], plan) for name in matrices if name in on_disk}
        for group in [tuple(matrices)] if plan.stream == "layer" else _groups(matrices, pieces):
            kind: Literal["layer", "part"] = "layer" if units[-1].layer != layer else "part"
            streamed = tuple(pieces[name] for name in group if name in pieces)
            units.append(Unit(len(units), kind, layer, streamed, computes=group))
    head = model.head
    num_rows = _rows(head.shape)
    if head.name not in on_disk:
        units.append(Unit(len(units), "head", None, (), 0, num_rows))
        return tuple(units)
    format_name = plan.weights.tensors[head.name].format
    row_bytes, tile = stored_bytes(head.shape, format_name) // num_rows, format_of(format_name).tile_rows
    largest = max((unit.streamed_bytes for unit in units), default=0) or HEAD_PIECE_BYTES
    rows = max(1, min(num_rows, largest // row_bytes) // tile) * tile
    for first in range(0, num_rows, rows):
        end = min(num_rows, first + rows)
        piece = Piece(head.name, first, end, (end - first) * row_bytes)
        units.append(Unit(len(units), "head", None, (piece,), first, end))
    return tuple(units)


HEAD_PIECE_BYTES = 16 * 2**20
"""Size of the pieces of a streamed head when no layer streams."""


def largest_read(largest_unit: float, head_bytes: float) -> float:
    """Bytes that no unit's read exceeds: the largest layer's (or matrix's), or a piece of the head where none of them streams."""
    return max(largest_unit, min(head_bytes, HEAD_PIECE_BYTES))


def slot_bytes(units: tuple[Unit, ...]) -> int:
    """Bytes of one ring buffer: the largest unit's."""
    return max(unit.slot_bytes for unit in units)


def num_slots(units: tuple[Unit, ...], prefetch_depth: int) -> int:
    """Ring buffers needed: one more than are read ahead, none when nothing streams, never more than there are streaming units."""
    streaming = sum(1 for unit in units if unit.streamed)
    return min(prefetch_depth + 1, streaming)


def block_tasks(
    units: tuple[Unit, ...],
    num_steps: int | Callable[[], int],
    num_micro_batches: int,
    prefetch_depth: int,
    spilled: Mapping[tuple[int, int], Spilled] = MappingProxyType({}),
) -> Iterator[Task]:
    """Tasks of one block: `num_steps` steps (the prefill and the decode steps) of all its micro-batches.

    num_steps: where rows end early and others take their places, the number of steps as it is known now. It may change between two
    steps; the step that was known to be the last is.

    A unit's read waits until every micro-batch has computed the unit that used the same ring buffer before. Reads are emitted
    `prefetch_depth` streaming units ahead of the compute tasks, across steps, so a walker that runs compute tasks in place never
    starves the reader. spilled: by (layer, micro-batch), see `_Staging`.
    """
    slots = num_slots(units, prefetch_depth)
    streaming = [unit for unit in units if unit.streamed]
    known = partial(int, num_steps) if isinstance(num_steps, int) else num_steps
    reads = ((step, unit) for step in takewhile(lambda step: step < known(), count()) for unit in streaming)
    users: dict[int, tuple[int, ...]] = {}
    read_task: deque[tuple[int, int]] = deque()
    numbers = count()
    next_slot = 0
    staging = _Staging(units, known, num_micro_batches, spilled, numbers)

    def read_next() -> Iterator[Task]:
        nonlocal next_slot
        upcoming = next(reads, None)
        if upcoming is None:
            return
        step, unit = upcoming
        task = Task(
            next(numbers), "read_weights", step, unit.index, None, "disk_read", unit.streamed_bytes,
            users.pop(next_slot, ()), next_slot,
        )  # fmt: skip
        read_task.append((task.index, next_slot))
        next_slot = (next_slot + 1) % slots
        yield task

    for _ in range(slots - 1 if slots else 0):
        yield from read_next()
    for step in takewhile(lambda step: step < known(), count()):
        for unit in units:
            depends: tuple[int, ...] = ()
            slot = None
            if unit.streamed:
                yield from read_next()
                waited, slot = read_task.popleft()
                depends = (waited,)
            indices = []
            for micro_batch in range(num_micro_batches):
                use = staging.use(step, unit, micro_batch)
                if use is not None:
                    yield from staging.loads(use)
                needed = depends if use is None else depends + staging.needs(use)
                kv_slot = None if use is None else use % STAGING_BUFFERS
                task = Task(next(numbers), "compute", step, unit.index, micro_batch, "host_compute", 0, needed, slot, kv_slot)
                yield task
                indices.append(task.index)
                if use is not None:
                    yield from staging.stores(use, task)
            if slot is not None:
                users[slot] = tuple(indices)


class _Staging:
    """Loads and stores of keys and values on the disk, uses numbered in graph order.

    The prefill makes them in a staging buffer, a decode step loads them there and adds its tokens; both store them, the last step alone
    does not. A load waits until its buffer's last use and the same keys' last store have ended, and is emitted one use ahead.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        num_steps: Callable[[], int],
        num_micro_batches: int,
        spilled: Mapping[tuple[int, int], Spilled],
        numbers: count[int],
    ) -> None:
        pairs = [(unit, batch) for unit in units if unit.kind == "layer" for batch in range(num_micro_batches)]
        self._users = [(unit.index, batch) for unit, batch in pairs if (unit.layer, batch) in spilled]
        self._sizes = [spilled[unit.layer, batch] for unit, batch in pairs if unit.layer is not None and (unit.layer, batch) in spilled]
        self._place = {user: place for place, user in enumerate(self._users)}
        self._num_steps, self._numbers = num_steps, numbers
        self._ahead = min(len(self._users), STAGING_BUFFERS) - 1
        self._next_load = len(self._users)
        self._loaded: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        """The task after which a use's buffer is free and its bytes are on the disk."""

    def use(self, step: int, unit: Unit, micro_batch: int) -> int | None:
        """The number of this use; None where nothing is on the disk."""
        place = self._place.get((unit.index, micro_batch))
        return None if place is None else step * len(self._users) + place

    def loads(self, use: int) -> Iterator[Task]:
        """What is to be loaded before this use is computed: itself, and one more."""
        last = min(use + self._ahead, self._num_steps() * len(self._users) - 1)
        for number in range(self._next_load, last + 1):
            step, place = divmod(number, len(self._users))
            unit, batch = self._users[place]
            before = {self._ended[number - STAGING_BUFFERS]} if number >= STAGING_BUFFERS else set()
            before.add(self._ended[number - len(self._users)])
            size, slot = self._sizes[place].num_bytes, number % STAGING_BUFFERS
            task = Task(
                next(self._numbers), "load_kv", step, unit, batch, "disk_read", size, tuple(sorted(before)), kv_slot=slot
            )
            self._loaded[number] = task.index
            yield task
        self._next_load = max(self._next_load, last + 1)

    def needs(self, use: int) -> tuple[int, ...]:
        """What computing a use waits for: its load, or in the prefill its buffer."""
        if use in self._loaded:
            return (self._loaded.pop(use),)
        return (self._ended[use - STAGING_BUFFERS],) if use >= STAGING_BUFFERS else ()

    def stores(self, use: int, compute: Task) -> Iterator[Task]:
        """The store behind a compute task."""
        self._ended[use] = compute.index
        self._ended.pop(use - len(self._users) - STAGING_BUFFERS, None)
        if compute.step + 1 == self._num_steps():
            return
        size = self._sizes[use % len(self._users)]
        task = Task(
            next(self._numbers), "store_kv", compute.step, compute.unit, compute.micro_batch, "disk_write",
            size.step_bytes if compute.step else size.num_bytes, (compute.index,), kv_slot=compute.kv_slot,
        )  # fmt: skip
        self._ended[use] = task.index
        yield task


def _whole(tensor: TensorShape, plan: Plan) -> Piece:
    num_bytes = stored_bytes(tensor.shape, plan.weights.tensors[tensor.name].format)
    return Piece(tensor.name, 0, _rows(tensor.shape), num_bytes, tensor.num_runs)


def _groups(matrices: list[str], streamed: dict[str, Piece]) -> list[tuple[str, ...]]:
    """A layer's matrices cut before every streamed one but the first."""
    starts = [0, *[i for i, name in enumerate(matrices) if name in streamed][1:], len(matrices)]
    return [tuple(matrices[first:end]) for first, end in pairwise(starts)]


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows
