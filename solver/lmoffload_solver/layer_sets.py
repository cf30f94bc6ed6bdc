"""A nearer bound where layers are alike and stream whole, and what to place by it.

A layer streams one of the sets of its matrices, and a ring buffer holds the largest that streams. So for each size of the buffer, with head
and embedding table at home or not, the layers stream a mix of the sets that are no larger, and of a mix means count: the bytes that it
frees, the seconds in which it is read, and with one or two buffers the seconds that reading and computing take in turn. Where so many bytes
must be freed, the least of such seconds is reached between two sets; these two, evenly spread, are a placement worth a simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lmoffload_solver.closed_form import Reading, StepSums, reading_bound_s
from lmoffload_solver.costs import Contention, num_requests
from lmoffload_solver.counting import Array
from lmoffload_solver.in_turn import HeldSets, Least, Steps, StreamingHead, between, least_from, one_buffer, two_buffers, with_loads
from lmoffload_solver.prices import Prices
from lmoffload_solver.rounding import Level, Placement, Rounding
from lmoffload_solver.schedule import aligned_bytes


@dataclass(frozen=True)
class Mix:
    """Layers that stream one of two sets."""

    bound_s: float
    """Seconds of the job that no placement with such a ring buffer, head and table goes below."""
    head_at_home: bool
    embedding_at_home: bool
    low: Level
    high: Level
    num_high: int


@dataclass(frozen=True)
class _Case:
    """A size of the ring buffer, with head and table at home or not."""

    place: int
    """Of the buffer's size."""
    head_at_home: bool
    embedding_at_home: bool
    freed: float
    """Bytes that what the layers stream must free."""


class LayerSets:
    """The sets of a layer's matrices, all layers alike."""

    def __init__(self, rounding: Rounding, prices: Prices) -> None:
        self.rounding, self.num_layers = rounding, len(rounding.ladders)
        every = sorted(rounding.ladders[0].every, key=lambda level: level.aligned)
        parts = [[prices.read_seconds(part.stored, part.requests) for part in level.parts if part.stored] for level in every]
        quickest: dict[tuple[int, int], int] = {}
        for place, level in enumerate(every):
            key = level.aligned, level.slot
            if key not in quickest or sum(parts[place]) < sum(parts[quickest[key]]):
                quickest[key] = place
        self.levels = tuple(every[place] for place in quickest.values())
        """By bytes, ascending from none; of sets with equal bytes and buffer the one that is read first."""
        self.sizes = np.array([level.aligned for level in self.levels], dtype=float)
        self.read_s = np.array([sum(parts[place]) for place in quickest.values()])
        cuts = {key: min(len(level.parts) - 1.0 for level in every if (level.aligned, level.slot) == key) for key in quickest}
        self.cuts = np.array(list(cuts.values()))
        self._hull = _hull(self.sizes, least_from(self.read_s))
        slots, largest_s = np.array([level.slot for level in every]), np.array([max(seconds, default=0.0) for seconds in parts])
        buffers = sorted(set(slots.tolist()))
        self.buffers = np.array(buffers, dtype=float)
        """Sizes of a ring buffer, ascending from 0."""
        self.within = [np.array([place for place, level in enumerate(self.levels) if level.slot <= size]) for size in buffers]
        """Of each size, the sets that it holds."""
        self.largest_s = np.array([largest_s[slots <= size].max() for size in buffers])
        """Reading what streams at once of them, at most."""
        self._least = np.array([min(level.aligned for level in self.levels if level.slot == size) for size in buffers], dtype=float)
        self._heads, slots_of_heads = zip(*self._streaming_heads(every, prices), strict=True)
        self._with_head = np.maximum(self.buffers, slots_of_heads)

    def mixes(self, rooms: Mapping[bool, int], depth: int, slow: Contention, steps: Steps) -> list[Mix]:
        """Mixes for sizes of the ring buffer, as many as had to be looked at: the first has the lowest bound, which is one of all
        placements. None where nothing fits.

        Args:
            rooms: bytes for the matrices, by whether the head is at home.
        """
        cases = self._cases(rooms, depth)
        found: list[Mix] = []
        least = np.inf
        for bound, case in sorted(zip(self._rough(cases, depth, slow, steps), cases, strict=True), key=lambda pair: pair[0]):
            if bound >= least:
                break
            found.append(self._mix(case, depth, slow, steps))
            least = min(least, found[-1].bound_s)
        return sorted(found, key=lambda mix: mix.bound_s)

    def placed(self, mix: Mix, depth: int) -> Placement:
        """The placement of a mix, evenly spread, the larger set first: it is read while the head is computed."""
        layers = [mix.high if layer * mix.num_high % self.num_layers < mix.num_high else mix.low for layer in range(self.num_layers)]
        return self.rounding.placed(layers, depth, mix.head_at_home, mix.embedding_at_home)

    def _streaming_heads(self, every: list[Level], prices: Prices) -> Iterator[tuple[StreamingHead, int]]:
        """By size of the ring buffer that the layers need: the head, and the bytes of a buffer, at least. Its pieces are as large as the
        largest read is stored, which may be one that takes a few pages less in memory than the largest."""
        levels = {level.largest_part: level for level in every}
        pieces = {size: self.rounding.placed([level] * self.num_layers, 0, False, False).head_pieces for size, level in levels.items()}
        reads = {size: [prices.read_seconds(piece, num_requests([piece])) for piece in of_size] for size, of_size in pieces.items()}
        for buffer in self.buffers.astype(int).tolist():
            least = min(level.largest_part for level in every if level.slot == buffer)
            may = {level.largest_part for level in every if level.slot <= buffer and level.largest_part >= least}
            sums, share = [sum(reads[size]) for size in may], max(max(pieces[size]) for size in may) / self.rounding.head_bytes
            piece_s, count = max(max(reads[size]) for size in may), max(len(pieces[size]) for size in may)
            yield StreamingHead(min(sums), max(sums), piece_s, share, count), min(aligned_bytes(pieces[size][0]) for size in may)

    def _cases(self, rooms: Mapping[bool, int], depth: int) -> list[_Case]:
        most = np.array([self.sizes[within[-1]] for within in self.within])
        cases = []
        for head, table in product((True, False), repeat=2):
            if self.rounding.model.tied_head and head != table:
                continue
            excess = self.rounding.layers_aligned + self.rounding.homes(head, table) - rooms[head]
            buffers = self.buffers if head else self._with_head
            freed = np.maximum(excess + (depth + 1) * buffers, self._least)  # one layer at least streams what needs the buffer
            fitting = np.flatnonzero(freed <= self.num_layers * most)
            cases += [_Case(place, head, table, float(freed[place])) for place in fitting.tolist()]
        return cases

    def _rough(self, cases: list[_Case], depth: int, slow: Contention, steps: Steps) -> list[float]:
        """Bounds with the least reading that sets of any size take."""
        bounds = np.zeros(len(cases))
        for homes in product((True, False), repeat=2):
            chosen = [place for place, case in enumerate(cases) if (case.head_at_home, case.embedding_at_home) == homes]
            if chosen:
                freed = np.array([cases[place].freed for place in chosen])
                read_s = self.num_layers * np.interp(freed / self.num_layers, *self._hull)
                reading = self._reading([cases[place] for place in chosen], read_s, depth, steps)
                bounds[chosen] = reading_bound_s(self._sums(homes[1], steps), slow, reading)
        found: list[float] = bounds.tolist()
        return found

    def _reading(self, cases: list[_Case], layers_s: Array, depth: int, steps: Steps) -> Reading:
        """What is read where the layers' reading takes so long; head and table are at home in all cases alike."""
        places, freed, at_home = [case.place for case in cases], np.array([case.freed for case in cases]), cases[0].head_at_home
        heads = [(0.0, 0.0) if at_home else (self._heads[place].least_s, self._heads[place].piece_s) for place in places]
        head_s, piece_s = np.array(heads).T
        seconds, largest_s = layers_s + head_s, self.largest_s[places]
        most = np.array([self.sizes[self.within[place][-1]] for place in places])
        beside = seconds - (depth + 1) * largest_s if at_home else np.where(depth > 0, -np.inf, seconds)
        return Reading(
            np.full(len(cases), float(depth)),
            seconds,
            early_s=(depth + 1) * np.maximum(largest_s, piece_s),
            layers=np.ceil(freed / np.maximum(most, 1.0)),
            first_s=np.full(len(cases), np.inf),
            beside_head_s=beside,
            after_layers_s=head_s - (depth + 1) * piece_s,
            load=steps.load[None],
            store=steps.store[None],
        )

    def _mix(self, case: _Case, depth: int, slow: Contention, steps: Steps) -> Mix:
        """The best mix of a case, and the bound by the sets that its buffer holds."""
        within, mean = self.within[case.place], case.freed / self.num_layers
        low, high, mean_s = between(self.sizes[within], self.read_s[within], mean)
        read_s, sums = self.num_layers * mean_s, self._sums(case.embedding_at_home, steps)
        bound = float(reading_bound_s(sums, slow, self._reading([case], np.array([read_s]), depth, steps))[0])
        in_turn = self._in_turn(case, read_s, depth, slow, sums, steps) if case.place else None
        if in_turn is not None:
            low, high, bound = *in_turn[:2], max(bound, in_turn[2])
        sizes = self.sizes[within]
        step, short = sizes[high] - sizes[low], case.freed - self.num_layers * sizes[low]
        num_high = min(self.num_layers, int(np.ceil(max(0.0, short) / step))) if step else 0
        levels = self.levels[within[low]], self.levels[within[high]]
        return Mix(bound, case.head_at_home, case.embedding_at_home, *levels, num_high)

    def _in_turn(self, case: _Case, read_s: float, depth: int, slow: Contention, sums: StepSums, steps: Steps) -> Least | None:
        """Two sets of those that the buffer holds, and seconds, where few buffers even out nothing; None where that is not known."""
        if depth > 1 or steps.turns is None or (depth and self.rounding.stream == "matrix"):
            return None
        within = self.within[case.place]
        head = None if case.head_at_home else self._heads[case.place]
        held = HeldSets(self.num_layers, self.sizes[within], self.read_s[within], self.cuts[within], self.largest_s[case.place], head)
        if steps.turns:
            return with_loads(held, case.freed, read_s, depth, slow, sums, steps)
        if not depth:
            return one_buffer(held, case.freed, sums, steps.piece)
        return two_buffers(held, case.freed, read_s, slow, sums, steps.piece)

    def _sums(self, embedding_at_home: bool, steps: Steps) -> StepSums:
        return steps.sums if embedding_at_home else replace(steps.sums, compute=steps.sums.compute + steps.lookup)


def _hull(sizes: Array, seconds: Array) -> tuple[Array, Array]:
    """The lower convex hull of points given in order of their sizes."""
    kept: list[tuple[float, float]] = []
    for x, y in zip(sizes.tolist(), seconds.tolist(), strict=True):
        if kept and kept[-1][0] == x:
            continue  # the first of equal sizes is the least from here on
        while len(kept) > 1 and (kept[-1][1] - kept[-2][1]) * (x - kept[-2][0]) >= (y - kept[-2][1]) * (kept[-1][0] - kept[-2][0]):
            kept.pop()
        kept.append((x, y))
    points = np.array(kept)
    return points[:, 0], points[:, 1]
