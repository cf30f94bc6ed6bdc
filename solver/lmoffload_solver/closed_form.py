"""The linear program solved by hand: seconds that streaming the least bytes does not go below, for fixed discrete choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lmoffload_solver.costs import Contention
from lmoffload_solver.counting import Array


@dataclass(frozen=True)
class StepSums:
    """Seconds of computing in the sampled steps of all different blocks, one row for each."""

    weight: Array
    """Steps of the job that each stands for."""
    compute: Array
    early: Array
    """1 where units in the ring buffers may have been read before the step begins, while a longer step computed; else 0."""
    layer: Array
    """The quickest layer."""
    head: Array
    """The output head, computed in one go or after each of its pieces is read."""


@dataclass(frozen=True)
class Layers:
    """The matrices of the layers. Bytes are those that streaming frees in memory, whole pages."""

    count: int
    num_bytes: float
    largest_bytes: float
    """Of a layer."""
    cut: bool
    """Whether each matrix streams by itself."""
    buffers: tuple[Array, Array]
    """(sizes that what streams at once can have, all bytes that stream through buffers of this size), ascending; empty: any size."""
    all_s: float
    """Reading all of it."""
    least_s_per_byte: float
    """Nothing is read in less."""
    most_s_per_byte: float
    """Nothing takes more."""
    unit_s: float
    """Reading the largest unit."""

    def least_streamed(self, excess: float, depth: int) -> float:
        """The least bytes that stream where `excess` bytes are not at home, nor is what the ring takes beside; infinite where even a full
        stream does not fit. A ring buffer holds the largest matrix that streams, or the largest layer's."""
        sizes, most = self.buffers
        if excess <= 0:
            return 0.0
        if len(sizes):
            streamed = excess + (depth + 1) * sizes
            fitting = np.flatnonzero(streamed <= most)
            return float(streamed[fitting[0]]) if len(fitting) else np.inf
        streamed_mean = excess / (1 - (depth + 1) / self.count) if depth + 1 < self.count else np.inf
        return streamed_mean if streamed_mean <= self.num_bytes else np.inf

    def by_number(self, excess: float) -> Array:
        """The same with a single buffer where 1, 2, ... layers stream something."""
        number = np.arange(1.0, self.count + 1)
        if self.cut:
            streamed = np.full(self.count, self.least_streamed(excess, 0))
        else:
            with np.errstate(divide="ignore"):
                buffer = excess / (number - 1)
            sizes, _ = self.buffers
            if len(sizes):
                larger = np.searchsorted(sizes, buffer)
                buffer = np.append(sizes, np.inf)[larger]
            streamed = excess + buffer
        return np.where(streamed <= number * self.largest_bytes * (1 + 1e-12), streamed, np.inf)

    @cached_property
    def row(self) -> tuple[float, ...]:
        """Numbers for `bounds_s`."""
        largest_unit = float(self.buffers[0][-1]) if self.cut else self.largest_bytes
        return self.num_bytes, self.all_s, self.least_s_per_byte, self.most_s_per_byte, self.unit_s, largest_unit


@dataclass(frozen=True)
class Head:
    """The output head: at home, or streaming in pieces."""

    num_bytes: float
    read_s: float
    piece_s: float
    """Reading its largest piece."""

    @property
    def s_per_byte(self) -> float:
        """Seconds to read a byte of it."""
        return self.read_s / self.num_bytes


@dataclass(frozen=True)
class Case:
    """One way to stream, of which the bound is asked."""

    layers: Layers
    head: Head
    head_streams: bool
    excess: float
    """Bytes of the layers that are not at home, but for what the ring takes beside."""
    depth: int
    """Prefetch depth."""
    transfers: int = 0
    """Which loads and stores of keys and values."""


def cases_of(layers: Layers, head: Head, room: float, depths: Sequence[int], transfers: int = 0) -> list[Case]:
    """The cases of so much room for the matrices: the head streaming, and at home, for each depth."""
    rooms = ((True, room), (False, room - head.num_bytes))
    return [Case(layers, head, streams, max(0.0, layers.num_bytes - left), d, transfers) for streams, left in rooms for d in depths]


def bounds_s(sums: StepSums, slow: Contention, cases: Sequence[Case], transfers: Sequence[tuple[Array, Array]]) -> Array:
    """Seconds of the job that no placement of the matrices goes below, for each case; infinite: none fits.

    Reading is the same for all steps, so the least streamed bytes are best. What is left at home takes no longer to read, byte by byte,
    than the slowest matrix. With a single ring buffer the number of layers that stream something counts: the fewer, the larger the buffer;
    the more, the longer computing waits; the bound is the least of all.

    Args:
        transfers: (loads, stores) by the number in the case.
    """
    layers = np.array([case.layers.row for case in cases])
    heads = np.array([(c.head.read_s, c.head.piece_s, 1.0) if c.head_streams else (0.0, 0.0, 0.0) for c in cases])
    rest = np.array([(c.excess, c.depth, c.transfers) for c in cases])
    alone = [place for place, case in enumerate(cases) if case.excess > 0 and case.depth == 0]
    count = cases[0].layers.count
    rows = np.concatenate([np.arange(len(cases)), np.repeat(np.array(alone, dtype=int), count)])
    number = np.concatenate([np.zeros(len(cases)), np.tile(np.arange(1.0, count + 1), len(alone))])
    of_numbers = [cases[place].layers.by_number(cases[place].excess) for place in alone]
    streamed = np.concatenate([np.array([c.layers.least_streamed(c.excess, c.depth) for c in cases]), *of_numbers])
    apart = np.minimum(number, count - number + 1)  # streaming layers with one before them that does not stream, or the first
    found = _bounds_s(sums, slow, layers[rows].T, heads[rows].T, rest[rows].T, streamed, number, apart, transfers)
    bounds, numbered = found[: len(cases)], found[len(cases) :].reshape(len(alone), count)
    bounds[alone] = np.maximum(bounds[alone], numbered.min(axis=1))
    return bounds


def _bounds_s(
    sums: StepSums, slow: Contention, layers: Array, heads: Array, rest: Array, streamed: Array, number: Array, apart: Array,
    transfers: Sequence[tuple[Array, Array]],
) -> Array:  # fmt: skip
    """The same for so many bytes, and layers that stream something; 0: not known."""
    num_bytes, all_s, least, most, unit_s, largest_unit = layers
    head_s, piece_s, streams = heads
    excess, depths, chosen = rest
    known = number > 0

    def read_s(streamed: Array) -> Array:
        return np.asarray(np.maximum(streamed * least, all_s - (num_bytes - streamed) * most))

    fits = streamed <= num_bytes
    streamed = np.where(fits, streamed, 0.0)
    seconds, ring = read_s(streamed) + head_s, (depths + 1) * largest_unit
    beside_head = np.where(excess > 0, read_s(excess + ring) - ring * most, -np.inf)  # a larger ring takes more, and no less is read for it
    reading = Reading(
        depths,
        seconds,
        early_s=(depths + 1) * np.maximum(unit_s, piece_s),
        layers=number,
        first_s=np.where(known, apart * unit_s + piece_s, np.inf),
        beside_head_s=np.where(streams > 0, np.where(depths > 0, -np.inf, seconds), beside_head),
        after_layers_s=np.where(streams > 0, head_s - (depths + 1) * piece_s, 0.0),
        load=np.array([load for load, _ in transfers])[chosen.astype(int)],
        store=np.array([store for _, store in transfers])[chosen.astype(int)],
    )
    return np.where(fits, reading_bound_s(sums, slow, reading), np.inf)


@dataclass(frozen=True)
class Reading:
    """What is read in a step, one row for each bound."""

    depths: Array
    seconds: Array
    early_s: Array
    """That the ring buffers may have taken in before a step begins."""
    layers: Array
    """Those that stream something, at least."""
    first_s: Array
    """Reading that with one buffer may fall into computing, at most: of what is computed right after something that does not stream; each
    other read waits for what is computed before it, and is waited for."""
    beside_head_s: Array
    """Reading that does not go on while the head is computed, at least: all but what the ring holds, where the head is at home; all of it
    with one buffer where it streams."""
    after_layers_s: Array
    """Reading of a head that streams that is left when the layers are computed, at least: all but what the ring holds."""
    load: Array
    """Of keys and values, [rows, steps]."""
    store: Array


def reading_bound_s(sums: StepSums, slow: Contention, reading: Reading) -> Array:
    """Seconds of the job that so much reading in each step does not go below: the rows of `program.Program`."""
    load, ahead_of = reading.load, reading.depths[:, None] > 0
    loads = load.max(axis=1, initial=0.0)[:, None] > 0
    read = reading.seconds[:, None] - reading.early_s[:, None] * sums.early
    both = read + load
    slowed = both + sums.compute * (slow.compute * (1 - 1 / slow.read)), sums.compute + both * (slow.read * (1 - 1 / slow.compute))
    head = reading.beside_head_s[:, None] - reading.early_s[:, None] * sums.early + sums.head
    ahead = np.maximum(np.maximum(*slowed), head)
    serial = np.maximum(both, np.maximum(read, head) + reading.layers[:, None] * sums.layer)
    serial = np.maximum(serial, sums.compute + (reading.seconds - reading.first_s)[:, None])
    overlapped = np.where(loads, np.maximum(serial, ahead), serial)
    after_layers = sums.compute - sums.head + reading.after_layers_s[:, None]
    computing = np.maximum(np.maximum(sums.compute, after_layers), reading.store)
    steps = np.maximum(computing, np.where(ahead_of, ahead, overlapped)) @ sums.weight
    reader = np.broadcast_to(reading.seconds[:, None] + load, steps.shape + sums.weight.shape) @ sums.weight
    return np.asarray(np.maximum(steps, reader))  # whatever is read early, it is read
