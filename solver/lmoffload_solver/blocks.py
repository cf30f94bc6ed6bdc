"""How the sequences of a job are cut into blocks and micro-batches, which steps are sampled, and what their computing costs.

Sequences are taken longest first, so that the first block needs most memory and the first micro-batch is the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lmoffload_solver import counting
from lmoffload_solver.costs import LayerKind, MachineCosts, Phase
from lmoffload_solver.counting import Array
from lmoffload_solver.model import ModelShape
from lmoffload_solver.workload import Workload

MAX_BLOCK_SAMPLES = 6
"""Blocks priced where a job has more different ones."""


CHUNK_MULTIPLE = 24
"""Tokens by which a prompt is cut into chunks (`lmoffload.kernels.prefill.QUERY_BLOCK`)."""


@dataclass(frozen=True)
class Step:
    """A sampled step of a block: 0 is the prefill, i the i-th decode step. It stands for `weight` steps."""

    step: int
    weight: float


@dataclass(frozen=True)
class Block:
    """Sequences [first_row, end_row) of the job, longest first; `count` blocks cost the same."""

    first_row: int
    end_row: int
    count: int

    def micro_batches(self, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """Rows [first, end) of each micro-batch."""
        starts = range(self.first_row, self.end_row, micro_batch)
        return tuple((first, min(first + micro_batch, self.end_row)) for first in starts)


def lengths_of(workload: Workload) -> tuple[int, ...]:
    """Prompt lengths, longest first."""
    groups = sorted(workload.prompts, key=lambda group: -group.length)
    return tuple(group.length for group in groups for _ in range(group.count))


def decode_steps(gen_len: int) -> tuple[Step, ...]:
    """Sampled decode steps of `gen_len` new tokens (the prefill gives the first): first, second, middle, last, each with the number of
    steps it stands for when times between two samples grow linearly."""
    last = gen_len - 1
    knots = sorted({step for step in (1, 2, (2 + last) // 2, last) if 1 <= step <= last})
    weights = dict.fromkeys(knots, 0.0)
    if knots:
        weights[knots[0]] = 1.0
    for begin, end in pairwise(knots):
        weights[begin] += (end - begin - 1) / 2
        weights[end] += (end - begin + 1) / 2
    return tuple(Step(step, weight) for step, weight in weights.items())


def blocks_of(lengths: Sequence[int], block_rows: int) -> tuple[Block, ...]:
    """The different blocks of a job, in order. Blocks of one length are one; where more than `MAX_BLOCK_SAMPLES` differ, evenly spread ones
    stand for their neighbours, the last (partial) one for itself."""
    num_rows = len(lengths)
    found: list[Block] = []
    for first in range(0, num_rows, block_rows):
        end = min(first + block_rows, num_rows)
        last = found[-1] if found else None
        same_size = last is not None and last.end_row - last.first_row == end - first
        if last is not None and same_size and lengths[last.first_row] == lengths[end - 1]:
            found[-1] = Block(last.first_row, last.end_row, last.count + 1)
        else:
            found.append(Block(first, end, 1))
    if len(found) <= MAX_BLOCK_SAMPLES:
        return tuple(found)
    body, tail = found[:-1], found[-1]
    bounds = np.linspace(0, len(body), MAX_BLOCK_SAMPLES).round().astype(int)
    sampled = []
    for begin, end in pairwise(bounds):
        middle = body[(begin + end) // 2]
        sampled.append(Block(middle.first_row, middle.end_row, sum(block.count for block in body[begin:end])))
    return (*sampled, tail)


@dataclass(frozen=True)
class BatchSizes:
    """What is computed at once of a block in a phase, its micro-batches or their chunks: different sizes, not padded, and how
    many there are of each."""

    tokens: Array
    counts: npt.NDArray[np.intp]
    rows: Array
    """Sequences that end in it: what the output head computes."""
    row_counts: npt.NDArray[np.intp]
    num_forwards: int
    total_tokens: float


@dataclass(frozen=True)
class StepSeconds:
    """Computing of one step of a block, contention left out."""

    layers: tuple[float, ...]
    """Per kind of layer, one layer over all micro-batches."""
    linears: tuple[tuple[float, ...], ...]
    """Per kind of layer, each of its linear layers: what of `layers` falls to a part of the layer."""
    head: float
    """The whole output head, all micro-batches; each of its pieces adds `piece`."""
    piece: float
    """What a switch of micro-batch within a layer or the head costs for all micro-batches: another call of the pool each."""
    around: float
    """Outside the layers: per micro-batch and per sequence."""
    lookup: float
    """Embedding rows read from disk, where the table is there."""


class JobCosts:
    """Computing costs of a job's blocks at one number of threads. Costs of a run of sequences are differences of running sums."""

    def __init__(
        self, model: ModelShape, workload: Workload, costs: MachineCosts, steps: tuple[Step, ...] | None = None, kv_format: str = "fp32"
    ) -> None:
        self.model, self.costs, self.kv_format = model, costs, kv_format
        self.lengths = lengths_of(workload)
        self.steps = (Step(0, 1.0), *decode_steps(workload.gen_len)) if steps is None else steps
        """The prefill, then the decode steps that are priced."""
        self._multiple = counting.token_multiple(model)
        kinds = [LayerKind.of(model, layer) for layer in range(model.num_layers)]
        self.kinds = tuple(dict.fromkeys(kinds))
        self.kind_of_layer = tuple(self.kinds.index(kind) for kind in kinds)
        self.layers_of_kind = tuple(self.kind_of_layer.count(index) for index in range(len(self.kinds)))
        self._tokens = _running(np.array(self.lengths, dtype=np.float64))
        self._attention = {step.step: [self._attention_sums(kind, step.step) for kind in self.kinds] for step in self.steps}

    def sizes(self, block: Block, micro_batch: int, phase: Phase, prefill_chunk: int | None = None) -> BatchSizes:
        """How large the micro-batches of a block are in a phase, or their chunks where prompts are cut."""
        if phase == "prefill" and prefill_chunk is not None:
            return self._chunk_sizes(block, micro_batch, prefill_chunk)
        starts = np.arange(block.first_row, block.end_row, micro_batch)
        ends = np.minimum(starts + micro_batch, block.end_row)
        num_rows = (ends - starts).astype(np.float64)
        exact = self._tokens[ends] - self._tokens[starts] if phase == "prefill" else num_rows
        tokens, counts = np.unique(exact, return_counts=True)
        rows, row_counts = np.unique(num_rows, return_counts=True)
        return BatchSizes(tokens, counts, rows, row_counts, len(starts), float(exact.sum()))

    def _chunk_sizes(self, block: Block, micro_batch: int, prefill_chunk: int) -> BatchSizes:
        cuts = [prompt_chunks(self._tokens, first, end, prefill_chunk) for first, end in block.micro_batches(micro_batch)]
        exact, ended = np.array([chunk for of_batch in cuts for chunk in of_batch], dtype=np.float64).T
        tokens, counts = np.unique(exact, return_counts=True)
        rows, row_counts = np.unique(ended[ended > 0], return_counts=True)
        return BatchSizes(tokens, counts, rows, row_counts, len(exact), float(exact.sum()))

    def linear_seconds(self, sizes: BatchSizes, kernel: str) -> tuple[tuple[float, ...], ...]:
        """Per kind of layer, each linear layer of one layer over all micro-batches."""
        return tuple(
            tuple(float((one * sizes.counts).sum()) for one in self.costs.linear_seconds(kind, kernel, sizes.tokens)) for kind in self.kinds
        )

    def rest_seconds(self, block: Block, sizes: BatchSizes, step: int, *, cut: bool = False) -> tuple[float, ...]:
        """Per kind of layer, what is no linear layer of one layer over all micro-batches at a sampled step."""
        tokens = np.ceil(sizes.tokens / self._multiple) * self._multiple
        fixed = [float((self.costs.rest_seconds(kind, tokens, cut=cut) * sizes.counts).sum()) for kind in self.kinds]
        sums = self._attention[step]
        return tuple(one + float(s[block.end_row] - s[block.first_row]) for one, s in zip(fixed, sums, strict=True))

    def head_seconds(self, sizes: BatchSizes, kernel: str) -> float:
        """The whole output head, all micro-batches."""
        return float((self.costs.head_seconds(self.model, kernel, sizes.rows) * sizes.row_counts).sum())

    def piece_seconds(self, sizes: BatchSizes) -> float:
        """What one more switch of micro-batch within a layer or the head costs."""
        return self.costs.machine.overheads.call_s(self.costs.compute_threads) * sizes.num_forwards

    def around_seconds(self, block: Block, sizes: BatchSizes) -> float:
        """What a step costs outside the layers and the head's product."""
        overheads = self.costs.machine.overheads
        return overheads.step_s * sizes.num_forwards + overheads.row_s * (block.end_row - block.first_row)

    def steps_seconds(
        self, block: Block, micro_batch: int, phase: Phase, kernel: str, prefill_chunk: int | None = None, *, cut: bool = False
    ) -> tuple[StepSeconds, ...]:
        """Seconds of each sampled step of a phase of a block, in micro-batches of `micro_batch` sequences; `cut`: layers at matrices."""
        sizes = self.sizes(block, micro_batch, phase, prefill_chunk)
        linears = self.linear_seconds(sizes, kernel)
        head, piece, around = self.head_seconds(sizes, kernel), self.piece_seconds(sizes), self.around_seconds(block, sizes)
        lookup = self.costs.lookup_seconds(self.model, on_disk=True) * sizes.total_tokens
        found = []
        for step in self.steps[:1] if phase == "prefill" else self.steps[1:]:
            rests = self.rest_seconds(block, sizes, step.step, cut=cut)
            layers = tuple(sum(of_kind) + rest for of_kind, rest in zip(linears, rests, strict=True))
            found.append(StepSeconds(layers, linears, head, piece, around, lookup))
        return tuple(found)

    def part_seconds(self, layer: int, seconds: StepSeconds, computes: Sequence[int], begins: bool) -> float:
        """Seconds of a part of a layer that computes some of its matrices; what is no product falls to the part that begins the layer."""
        kind = self.kind_of_layer[layer]
        linears = seconds.linears[kind]
        if begins and len(computes) == len(linears):
            return seconds.layers[kind]
        rest = seconds.layers[kind] - sum(linears) if begins else seconds.piece
        return sum(linears[i] for i in computes) + rest

    def total(self, seconds: StepSeconds, num_pieces: int, embedding_on_disk: bool) -> float:
        """Seconds of the whole step."""
        layers = sum(count * one for count, one in zip(self.layers_of_kind, seconds.layers, strict=True))
        return layers + seconds.head + num_pieces * seconds.piece + seconds.around + (seconds.lookup if embedding_on_disk else 0.0)

    @cached_property
    def _distinct(self) -> tuple[tuple[int, ...], npt.NDArray[np.intp]]:
        values, inverse = np.unique(np.array(self.lengths), return_inverse=True)
        return tuple(int(value) for value in values), inverse

    def _attention_sums(self, kind: LayerKind, step: int) -> Array:
        lengths, inverse = self._distinct
        if step == 0:
            seconds = self.costs.prefill_attention_seconds(kind.shape, lengths, self.kv_format)
        else:
            seconds = self.costs.decode_attention_seconds(kind.shape, [length + step for length in lengths], self.kv_format)
        return _running(seconds[inverse])


def prompt_chunks(tokens: Array, first_row: int, end_row: int, prefill_chunk: int) -> list[tuple[int, int]]:
    """(tokens, sequences that end in it) of each chunk of a micro-batch's prompts, as the executor cuts them (`Plan.prefill_chunk`): filled
    one after another, a prompt cut at whole blocks of `CHUNK_MULTIPLE` tokens.

    Args:
        tokens: running sum of the prompts' tokens, from 0.
    """
    most = max(prefill_chunk, CHUNK_MULTIPLE)
    row, at, end = first_row, int(tokens[first_row]), int(tokens[end_row])
    chunks: list[tuple[int, int]] = []
    while at < end:
        whole = min(int(np.searchsorted(tokens, at + most, side="right")) - 1, end_row)
        goes_on = max(at, int(tokens[whole]))
        rest = 0 if whole == end_row else (at + most - goes_on) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
        chunks.append((goes_on + rest - at, whole - row))
        row, at = whole, goes_on + rest
    return chunks


def _running(values: Array) -> Array:
    return np.concatenate(([0.0], np.cumsum(values)))
