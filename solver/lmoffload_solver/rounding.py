"""From fractions to whole tensors: which matrices are at home in memory and which stream, spread evenly over the layers.

The program's fractions say how many bytes of the layers stay and how large a ring buffer must be. Here each layer gets a set of whole
matrices to stream no larger than the ring buffer, and the running sum of streamed bytes follows its even share from layer to layer, so
that every window of prefetch-depth layers streams nearly equal bytes. Head and embedding table, one tensor each, are tried at home and on
disk.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, product
from typing import Literal

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.costs import num_requests
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.plan import TensorPlan
from lmoffload_solver.schedule import HEAD_PIECE_BYTES, aligned_bytes

MOST_SUBSETS_OF = 12
"""Above this many matrices in a layer only sets of its largest matrices are considered, not every set."""

BUFFER_SIZES_TRIED = 2
"""The smallest ring buffers that fit are filled; a larger one sometimes divides better into whole matrices."""
FEW_LAYERS = 8
"""With no more layers than this a single matrix weighs much: larger buffers are tried as well, and layers wholly at home."""
SPARSE_LEVELS = 12
"""Amounts tried that a layer streams where others stream nothing."""
FEW_PLACEMENTS = 600
"""No more sets of whole matrices than this are all tried."""
LARGER_BUFFERS = 4
"""Larger buffers tried where layers are few, evenly spread over all that fit."""
SINGLE_BUFFERS = 16
"""The same where there is a single one: the larger, the fewer layers wait for it."""


Stream = Literal["layer", "matrix"]
"""What streams at once: all streamed matrices of a layer, or each alone."""


@dataclass(frozen=True, eq=False)
class Part:
    """What is computed of a layer between two switches of micro-batch: the whole layer, or from one streamed matrix to the next."""

    stored: int
    requests: int
    computes: tuple[int, ...]
    """Places in the layer's list of matrices."""


@dataclass(frozen=True, eq=False)
class Level:
    """A set of a layer's matrices to stream; each is made once, so that it is compared by identity."""

    aligned: int
    stored: int
    places: frozenset[int]
    """Places in the layer's list of matrices."""
    parts: tuple[Part, ...]
    slot: int
    """Bytes of a ring buffer that holds its largest part."""

    @cached_property
    def num_streaming(self) -> int:
        return sum(part.stored > 0 for part in self.parts)

    @cached_property
    def largest_part(self) -> int:
        return max(part.stored for part in self.parts)


class Ladder:
    """The sets of matrices of one kind of layer."""

    def __init__(self, matrices: tuple[TensorShape, ...], stream: Stream) -> None:
        stored = [counting.tensor_bytes(t) for t in matrices]
        aligned = [aligned_bytes(size, t.num_runs) for size, t in zip(stored, matrices, strict=True)]
        alike = [(t.shape, t.format) for t in matrices]
        every: dict[object, Level] = {}
        for chosen in _subsets(stored):
            total = sum(aligned[i] for i in chosen)
            slot = max((aligned[i] for i in chosen), default=0) if stream == "matrix" else total
            parts = tuple(_parts(stored, chosen, stream))
            behaviour = tuple((part.stored, part.requests, tuple(sorted(alike[i] for i in part.computes))) for part in parts)
            every.setdefault(behaviour, Level(total, sum(stored[i] for i in chosen), chosen, parts, slot))
        self.every = tuple(every.values())
        """Of sets that are read and computed alike one."""
        levels: dict[tuple[int, int], Level] = {}
        for level in self.every:
            levels.setdefault((level.aligned, level.slot), level)
        self.levels = tuple(levels[key] for key in sorted(levels))
        """By bytes, ascending; of sets with equal bytes and buffer one."""
        self.whole = self.levels[-1].aligned
        self.slots = sorted({level.slot for level in self.levels})
        self.most_parts = max(len(level.parts) for level in self.levels)
        self.within = cache(self._within)

    def at_most(self, buffer: int, most: int | None = None) -> Level:
        """The largest set, of at most so many bytes, that a ring buffer of `buffer` bytes can stream."""
        levels, sizes = self.within(buffer)
        return levels[-1] if most is None else levels[bisect_right(sizes, most) - 1]

    def at_least(self, size: float, buffer: int) -> Level:
        """The smallest set of at least `size` bytes, or else the largest, that a ring buffer can stream."""
        levels, sizes = self.within(buffer)
        return levels[min(bisect_left(sizes, size), len(levels) - 1)]

    def _within(self, buffer: int) -> tuple[list[Level], list[int]]:
        levels = [level for level in self.levels if level.slot <= buffer]
        return levels, [level.aligned for level in levels]


@dataclass(frozen=True)
class Placement:
    """Where every matrix is at home."""

    layers: tuple[Level, ...]
    """What each layer streams."""
    head_at_home: bool
    embedding_at_home: bool
    head_pieces: tuple[int, ...]
    """Stored bytes of the pieces in which the head streams; one piece of 0 bytes when it is at home."""
    slots: int
    slot_bytes: int
    home_bytes: int

    @property
    def streams(self) -> tuple[bool, ...]:
        """Per unit (embedding, parts of layers, head pieces): does it stream?"""
        in_layers = (part.stored > 0 for level in self.layers for part in level.parts)
        return (False, *in_layers, *(size > 0 for size in self.head_pieces))

    @property
    def streamed_bytes(self) -> int:
        """Stored bytes moved per step."""
        return sum(level.stored for level in self.layers) + sum(self.head_pieces)

    @property
    def memory_bytes(self) -> int:
        """Homes and ring buffers of the matrices."""
        return self.home_bytes + self.slots * self.slot_bytes


class Rounding:
    """Whole-tensor placements of a model."""

    def __init__(self, model: ModelShape, stream: Stream = "layer") -> None:
        self.model, self.stream = model, stream
        matrices = [counting.layer_matrices(model, layer) for layer in range(model.num_layers)]
        kinds = [tuple((t.shape, t.format) for t in tensors) for tensors in matrices]
        distinct = list(dict.fromkeys(kinds))
        ladders = [Ladder(matrices[kinds.index(kind)], stream) for kind in distinct]
        self.ladders = tuple(ladders[distinct.index(kind)] for kind in kinds)
        self.head_bytes = counting.tensor_bytes(model.head)
        self.embedding_bytes = 0 if model.tied_head else counting.tensor_bytes(model.embedding)
        self._row_bytes = counting.row_bytes(model.head)
        self._buffers = np.array(sorted({size for ladder in ladders for size in ladder.slots}))
        counts = [kinds.count(kind) for kind in distinct]
        best = [[ladder.at_most(int(size)) for size in self._buffers] for ladder in ladders]
        self._streamed = sum(np.array([lv.aligned for lv in levels]) * n for levels, n in zip(best, counts, strict=True))
        self._units = sum(np.array([lv.num_streaming for lv in levels]) * n for levels, n in zip(best, counts, strict=True))
        self._slot = np.array([max(lv.slot for lv in levels) for levels in zip(*best, strict=True)])
        self.layers_aligned = sum(ladder.whole for ladder in self.ladders)
        self.all_bytes = self.layers_aligned + self.homes(True, True)
        self.num_units = sum(ladder.most_parts for ladder in self.ladders)
        self.few = math.prod(len(ladder.every) for ladder in self.ladders) <= FEW_PLACEMENTS
        """Whether all placements are tried."""
        self.placements, self.every = cache(self._placements), cache(self._every)

    def _placements(self, budget: int, prefetch_depth: int, head_at_home: bool) -> tuple[Placement, ...]:
        """Different placements whose homes and ring buffers fit `budget` bytes; none where nothing fits."""
        found: dict[Placement, None] = {}
        sparse = self.model.num_layers <= FEW_LAYERS or not prefetch_depth
        for embedding_at_home in (head_at_home,) if self.model.tied_head else (True, False):
            for size in self._sizes(budget, prefetch_depth, head_at_home, embedding_at_home):
                for most in (None, *self._sparse_levels(size)) if sparse else (None,):
                    placement = self._fill(budget, prefetch_depth, size, head_at_home, embedding_at_home, most)
                    if placement.memory_bytes <= budget:
                        found[placement] = None
        return tuple(found)

    def _every(self, budget: int, prefetch_depth: int, head_at_home: bool) -> tuple[Placement, ...]:
        """All placements that fit."""
        found = []
        for embedding_at_home in (head_at_home,) if self.model.tied_head else (True, False):
            for layers in product(*(ladder.every for ladder in self.ladders)):
                placement = self.placed(layers, prefetch_depth, head_at_home, embedding_at_home)
                if placement.memory_bytes <= budget:
                    found.append(placement)
        return tuple(found)

    def _sparse_levels(self, buffer: int) -> list[int]:
        """Bytes that a layer may stream at most, where some layers stream nothing: all that the buffer can, and evenly spread below it."""
        sizes = sorted({level.aligned for ladder in dict.fromkeys(self.ladders) for level in ladder.within(buffer)[0]} - {0})
        if self.stream == "layer":
            return sizes[-1:]
        return sizes if len(sizes) <= SPARSE_LEVELS else [sizes[int(i)] for i in np.linspace(0, len(sizes) - 1, SPARSE_LEVELS).round()]

    def least(self, prefetch_depth: int = 0) -> Placement:
        """The placement that needs least memory."""
        options = [
            self._fill(0, prefetch_depth, int(size), head_at_home, False) for size in self._buffers for head_at_home in (True, False)
        ]
        return min(options, key=lambda p: p.memory_bytes)

    def tensors(self, placement: Placement) -> dict[str, TensorPlan]:
        """The placement of every tensor, by name."""
        model = self.model
        on_disk = {tensor.name for tensor in model.tensors if tensor.is_table}
        for layer, level in enumerate(placement.layers):
            matrices = counting.layer_matrices(model, layer)
            on_disk |= {matrices[i].name for i in level.places}
        if not placement.embedding_at_home:
            on_disk.add(model.embedding.name)
        if not placement.head_at_home:
            on_disk.add(model.head.name)
        host: dict[str, TensorPlan] = {}
        disk: dict[str, TensorPlan] = {}
        for tensor in model.tensors:
            known = disk if tensor.name in on_disk else host
            if tensor.format not in known:
                known[tensor.format] = TensorPlan(format=tensor.format, tier="disk" if known is disk else "host")
        return {t.name: (disk if t.name in on_disk else host)[t.format] for t in model.tensors}

    def homes(self, head_at_home: bool, embedding_at_home: bool) -> int:
        head = aligned_bytes(self.head_bytes) if head_at_home else 0
        return head + (aligned_bytes(self.embedding_bytes) if embedding_at_home and self.embedding_bytes else 0)

    def _sizes(self, budget: int, depth: int, head_at_home: bool, embedding_at_home: bool) -> list[int]:
        """The smallest ring buffers for which everything that must then stay at home fits the budget, and a few larger ones."""
        pieces = 0 if head_at_home else 1
        slots = np.minimum(depth + 1, self._units + pieces)
        slot = self._slot if head_at_home else np.where(self._slot > 0, self._slot, aligned_bytes(self._first_piece(0)))
        need = self.homes(head_at_home, embedding_at_home) + self.layers_aligned - self._streamed + slots * slot
        fitting = self._buffers[need <= budget]
        if (self.model.num_layers > FEW_LAYERS and depth) or len(fitting) <= BUFFER_SIZES_TRIED:
            return [int(size) for size in fitting[:BUFFER_SIZES_TRIED]]
        larger = np.linspace(BUFFER_SIZES_TRIED, len(fitting) - 1, LARGER_BUFFERS if depth else SINGLE_BUFFERS).round().astype(int)
        return [int(size) for size in fitting[[*range(BUFFER_SIZES_TRIED), *sorted(set(larger.tolist()))]]]

    def _fill(
        self, budget: int, depth: int, buffer: int, head_at_home: bool, embedding_at_home: bool, sparse: int | None = None
    ) -> Placement:
        """Stream what ring buffers of `buffer` bytes can, and keep at home what the budget still holds, evenly: a little of each layer, or,
        where a layer streams `sparse` bytes at most, nothing of some layers and as much of the others."""
        best = [ladder.at_most(buffer, sparse) for ladder in self.ladders]
        most = sum(level.aligned for level in best)
        _, slots, slot = self._ring(best, depth, head_at_home)
        homes = self.homes(head_at_home, embedding_at_home)
        spare = budget - homes - (self.layers_aligned - most) - slots * slot
        goal = max(0, most - max(0, spare))
        placement = self._streaming(goal, best, buffer, depth, head_at_home, embedding_at_home, sparse is not None)
        if goal == 0 and placement.memory_bytes > budget:  # a head that streams alone has large pieces; a matrix beside it makes them small
            placement = self._streaming(1, best, buffer, depth, head_at_home, embedding_at_home, sparse is not None)
        return placement

    def _streaming(
        self, goal: int, best: Sequence[Level], buffer: int, depth: int, head_at_home: bool, embedding_at_home: bool, sparse: bool
    ) -> Placement:
        """The layers stream at least `goal` bytes together, no layer more than its level of `best`."""
        rough = sum(level.aligned for level in self._levels(goal, best, buffer, sparse))
        layers = self._levels(rough, best, buffer, sparse)  # whole matrices come to more than the goal: spread what they come to
        return self.placed(layers, depth, head_at_home, embedding_at_home)

    def placed(self, layers: Sequence[Level], depth: int, head_at_home: bool, embedding_at_home: bool) -> Placement:
        """The placement in which the layers stream these levels."""
        pieces, slots, slot = self._ring(layers, depth, head_at_home)
        streamed = sum(level.aligned for level in layers)
        home = self.homes(head_at_home, embedding_at_home) + self.layers_aligned - streamed
        return Placement(tuple(layers), head_at_home, embedding_at_home, pieces, slots, slot, home)

    def _levels(self, goal: int, best: Sequence[Level], buffer: int, sparse: bool) -> list[Level]:
        """What each layer streams: the running sum follows its even share of the goal."""
        most = sum(level.aligned for level in best)
        layers: list[Level] = []
        streamed = share = 0
        for ladder, level in zip(self.ladders, best, strict=True):
            share += level.aligned
            wanted = (goal * share - streamed * most) / most if most else 0.0
            chosen = ladder.at_least(wanted, buffer) if wanted > 0 else ladder.levels[0]
            chosen = level if chosen.aligned > level.aligned or (sparse and wanted > 0) else chosen
            layers.append(chosen)
            streamed += chosen.aligned
        return layers

    def _ring(self, layers: Sequence[Level], depth: int, head_at_home: bool) -> tuple[tuple[int, ...], int, int]:
        """Head pieces, ring buffers, and bytes of one, as the schedule makes them."""
        pieces = self._pieces(max(level.largest_part for level in layers), head_at_home)
        slot = max(level.slot for level in layers)
        streaming = sum(level.num_streaming for level in layers)
        if not head_at_home:
            slot, streaming = max(slot, aligned_bytes(pieces[0])), streaming + len(pieces)
        return pieces, min(depth + 1, streaming), slot if streaming else 0

    def _first_piece(self, largest: int) -> int:
        rows = max(1, min(self.head_bytes // self._row_bytes, (largest or HEAD_PIECE_BYTES) // self._row_bytes))
        return rows * self._row_bytes

    def _pieces(self, largest: int, head_at_home: bool) -> tuple[int, ...]:
        """The pieces of `schedule.units_of`: no larger than the largest layer's streamed bytes."""
        if head_at_home:
            return (0,)
        piece = self._first_piece(largest)
        whole, rest = divmod(self.head_bytes, piece)
        return (piece,) * whole + ((rest,) if rest else ())


def _parts(stored: list[int], chosen: frozenset[int], stream: Stream) -> Iterator[Part]:
    """The parts of `schedule.units_of`: cut before every streamed matrix but the first, or not at all."""
    cuts = sorted(chosen)[1:] if stream == "matrix" else []
    for first, end in pairwise([0, *cuts, len(stored)]):
        sizes = [stored[i] for i in range(first, end) if i in chosen]
        yield Part(sum(sizes), num_requests(sizes), tuple(range(first, end)))


def _subsets(stored: list[int]) -> Iterator[frozenset[int]]:
    if len(stored) <= MOST_SUBSETS_OF:
        for flags in product((False, True), repeat=len(stored)):
            yield frozenset(i for i, flag in enumerate(flags) if flag)
        return
    order = sorted(range(len(stored)), key=lambda i: -stored[i])
    for count in range(len(order) + 1):
        yield frozenset(order[:count])
