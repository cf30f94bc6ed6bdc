"""Reading and computing in turn: with one or two ring buffers nothing evens out what one layer takes beside what the next one takes, so the
sets of matrices that layers stream add seconds of their own to a step. Least seconds of the job over all mixes of sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmoffload_solver.closed_form import StepSums
from lmoffload_solver.costs import Contention
from lmoffload_solver.counting import Array
from lmoffload_solver.kv_homes import Transfers


@dataclass(frozen=True)
class StreamingHead:
    """A head that streams in pieces; all 0 where it is at home."""

    least_s: float
    """Reading all of it, at least."""
    most_s: float
    piece_s: float
    """Reading its largest piece, at most."""
    share: float
    """Of the head in its largest piece."""
    pieces: float
    """How many, at most."""


@dataclass(frozen=True)
class HeldSets:
    """The sets of a layer's matrices that a ring buffer holds, ascending, the first the empty one; and the head beside them."""

    num_layers: int
    sizes: Array
    """Bytes that streaming one frees."""
    read_s: Array
    cuts: Array
    """Switches of micro-batch more than where the layer is computed in one go."""
    largest_s: float
    """Reading what streams at once, at most."""
    head: StreamingHead | None
    """None where it is at home."""


@dataclass(frozen=True)
class Turns:
    """A layer's micro-batches of a block whose keys and values are on the disk, [sampled steps, micro-batches], seconds."""

    compute: Array
    load: Array
    store: Array

    @staticmethod
    def of(moved: Transfers, compute: Sequence[Sequence[float]]) -> Turns:
        """What is moved of a layer, with its computing by micro-batch and sampled step: the prefill loads nothing, the last step stores
        nothing."""
        nothing, decoding = [0.0] * len(compute), len(compute[0]) - 1
        load = [nothing] + [moved.load] * decoding
        store = [*([moved.make, *([moved.add] * (decoding - 1))] if decoding else []), nothing]
        return Turns(np.array(compute).T, np.array(load), np.array(store))


@dataclass(frozen=True)
class Steps:
    """The sampled steps of a candidate, those of all different blocks."""

    sums: StepSums
    lookup: Array
    """Seconds more where the embedding table is on disk."""
    piece: Array
    """Seconds of one more switch of micro-batch."""
    load: Array
    store: Array
    turns: tuple[Turns, ...] | None
    """Of each block; none where all keys and values are in memory, None where layers differ."""


Least = tuple[int, int, float]
"""The two sets of the best mix, and the job's seconds at least."""


def one_buffer(held: HeldSets, freed: float, sums: StepSums, piece: Array) -> Least:
    """With a single buffer reading and computing what streams follow each other.

    Over the units that stream, r their reads, c their computing and b that of what streams nothing behind them, a step takes
    Σ c_u + max(r_{u+1}, b_u), but for what of the first read falls into a longer step before.
    """
    head, largest_s = held.head, held.largest_s
    cost = held.read_s[:, None] + sums.layer + held.cuts[:, None] * piece
    cost[0] = np.maximum(0.0, sums.layer - max(largest_s, head.piece_s if head else 0.0))
    beside = sums.head + head.least_s if head else np.maximum(0.0, sums.head - largest_s)
    return _least(held, freed, cost, beside - np.where(sums.early > 0, largest_s, 0.0), sums)


def two_buffers(held: HeldSets, freed: float, read_s: float, slow: Contention, sums: StepSums, piece: Array) -> Least:
    """With two buffers a read begins with the computing of the unit before it.

    Where every layer streams something, a step takes Σ max(r_{u+1}, c_u), but that computing a head at home takes the reads of two buffers
    with it, and that the first read may fall into a longer step before. Where some layers stream nothing, such a layer too is computed
    while reads are longer than the computing of their layers, at most two of them.

    Args:
        read_s: reading of the layers in a step, at least.
    """
    head = held.head or StreamingHead(0.0, 0.0, 0.0, 1.0, 0.0)
    slowed = _Slowed.of(held, head, read_s, np.zeros_like(piece), slow, sums, piece)
    layer, of_head, largest = slowed.computes_by * sums.layer, slowed.computes_by * sums.head, slowed.reads_by * held.largest_s
    longer = np.maximum(0.0, largest - layer)
    cost = np.maximum(slowed.reads_by * held.read_s[:, None], layer)
    cost[0] = np.maximum(0.0, layer - 2 * longer)
    pieces = np.maximum(slowed.reads_by * (head.least_s - head.piece_s), of_head * (1 - head.share))
    # What the step before computed behind its last read is no longer than what this one does, but for how they are slowed.
    slower = np.append(0.0, np.maximum(0.0, slowed.computes_most_by[:-1] - slowed.computes_by[1:]) * slowed.longest[:-1])
    before = largest if held.head else np.clip(2 * longer - of_head, 0.0, longer)
    all_stream = pieces if held.head else np.maximum(0.0, of_head - 2 * longer)
    all_stream = all_stream - np.where(sums.early > 0, before, np.minimum(before, slower))
    some_stream = cost[0] - 2 * longer + (pieces - slowed.reads_by * head.piece_s if held.head else of_head)
    seconds, layers = cost @ sums.weight, held.num_layers
    low, high, mean_s = between(held.sizes[1:], seconds[1:], max(freed / layers, held.sizes[1]))
    found = [(layers * mean_s + float(all_stream @ sums.weight), low + 1, high + 1)]
    if freed <= (layers - 1) * held.sizes[-1]:
        low, high, mean_s = between(held.sizes, seconds, freed / (layers - 1))
        found.append(((layers - 1) * mean_s + float(some_stream @ sums.weight), low, high))
    total_s, low, high = min(found)
    return low, high, total_s


def with_loads(held: HeldSets, freed: float, read_s: float, depth: int, slow: Contention, sums: StepSums, steps: Steps) -> Least:
    """With keys and values of all layers on the disk these are loaded while the micro-batch before is computed. With one buffer a layer's
    read stands before all of that, with two before the loads of all but the first micro-batch of the layer before. Of the prefill, which
    loads nothing, either reading or computing counts."""
    assert steps.turns
    head = held.head or StreamingHead(0.0, 0.0, 0.0, 1.0, 0.0)
    load_s = np.concatenate([turns.load.sum(axis=1) for turns in steps.turns])
    slowed = _Slowed.of(held, head, read_s, held.num_layers * load_s, slow, sums, steps.piece)
    read, largest, of_head = slowed.reads_by * held.read_s[:, None], slowed.reads_by * held.largest_s, slowed.computes_by * sums.head
    ahead = read * ((load_s > 0) & (depth > 0))
    ends = np.cumsum([0, *(len(turns.load) for turns in steps.turns)])
    of_blocks = [
        _layer_with_loads(turns, ahead[:, first:end], slowed.reads_by[first:end], slowed.computes_by[first:end])
        for turns, first, end in zip(steps.turns, ends[:-1], ends[1:], strict=True)
    ]
    cost, behind, longer = (np.concatenate(parts, axis=-1) for parts in zip(*of_blocks, strict=True))
    layer = cost[-1].copy()
    if held.head:
        pieces = np.maximum(slowed.reads_by * (head.least_s - head.piece_s), of_head * (1 - head.share)) - largest
        beside = pieces if depth else slowed.reads_by * head.least_s + of_head
    else:
        beside = np.maximum(0.0, of_head - longer - (0.0 if depth else largest))
        beside[-1] -= largest[-1] if depth else 0.0  # behind the last step nothing is read ahead
    if not depth:
        cost[1:] += read[1:]
    computes, prefill = layer >= largest, load_s == 0
    cost[:, prefill] = np.where(computes, layer, read)[:, prefill]
    rest = np.where(prefill, np.where(computes, of_head, -2 * largest), beside - behind)
    return _least(held, freed, cost, rest, sums)


@dataclass(frozen=True)
class _Slowed:
    """Factors by which a step's tasks are slowed: reads no less than where all is read that may be, computing no less than where the least
    is."""

    reads_by: Array
    computes_by: Array
    computes_most_by: Array
    longest: Array
    """Computing of the step alone, at most."""

    @staticmethod
    def of(held: HeldSets, head: StreamingHead, read_s: float, loads: Array, slow: Contention, sums: StepSums, piece: Array) -> _Slowed:
        least, most = read_s + head.least_s + loads, held.num_layers * held.largest_s + head.most_s + loads
        longest = sums.compute + head.pieces * piece
        rows = zip(least.tolist(), most.tolist(), sums.compute.tolist(), longest.tolist(), strict=True)
        factors = [(slow.stretched(d, c)[0] / d, slow.stretched(b, long)[1] / long, slow.stretched(d, c)[1] / c) for b, d, c, long in rows]
        reads_by, computes_by, computes_most_by = np.array(factors).T
        return _Slowed(reads_by, computes_by, computes_most_by, longest)


def _layer_with_loads(turns: Turns, read: Array, reads_by: Array, computes_by: Array) -> tuple[Array, Array, Array]:
    """(Seconds from the begin of a layer's first micro-batch to the end of its last and of the load that follows; how much later than the
    one the other ends at most; how much longer than computing all of it that is), with `read`, [sets, steps], before the second load. The
    first set is that of a layer that streams nothing: more is read while its last is computed. As `simulate.staged_pipeline`."""
    compute, load, store = turns.compute.T * computes_by, turns.load.T * reads_by, turns.store.T
    read_end, computed, stored, before = read, compute[0], compute[0] + store[0], np.zeros_like(computes_by)
    for compute_s, load_s, store_s in zip(compute[1:], load[1:], store[1:], strict=True):
        read_end = np.maximum(read_end, before) + load_s
        computed = np.maximum(computed, read_end) + compute_s
        before, stored = stored, np.maximum(stored, computed) + store_s
    loaded = np.maximum(read_end, before) + load[0]
    seconds = np.maximum(loaded, computed)
    behind, longer = np.max(seconds - computed, axis=0), np.max(seconds, axis=0) - compute.sum(axis=0)
    seconds[0] = loaded[0]
    return seconds, behind, longer


def _least(held: HeldSets, freed: float, cost: Array, rest: Array, sums: StepSums) -> Least:
    low, high, mean_s = between(held.sizes, cost @ sums.weight, freed / held.num_layers)
    return low, high, held.num_layers * mean_s + float(rest @ sums.weight)


def between(sizes: Array, seconds: Array, mean: float) -> Least:
    """The two sets between which so many bytes in the mean take the least seconds in the mean, more bytes being no worse; those seconds."""
    least = least_from(seconds)
    below, above = np.flatnonzero(sizes <= mean), np.flatnonzero(sizes >= min(mean, sizes[-1]))
    step = sizes[above] - sizes[below, None]
    share = np.where(step > 0, (mean - sizes[below, None]) / np.maximum(step, 1.0), 0.0)
    mixed = least[below, None] * (1 - share) + least[above] * share
    low, high = np.unravel_index(int(mixed.argmin()), mixed.shape)
    chosen = [int(place + np.argmin(seconds[place:])) for place in (below[low], above[high])]
    return chosen[0], chosen[1], float(mixed[low, high])


def least_from(seconds: Array) -> Array:
    """The least of each and all that follow."""
    return np.asarray(np.minimum.accumulate(seconds[::-1])[::-1])
