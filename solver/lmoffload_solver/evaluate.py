"""What a candidate of one variant costs: its bound, its whole-tensor placements and their simulated times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.blocks import Block, JobCosts, StepSeconds
from lmoffload_solver.candidate import Candidate
from lmoffload_solver.closed_form import Reading, StepSums, bounds_s, cases_of, reading_bound_s
from lmoffload_solver.costs import Contention, Phase, num_requests
from lmoffload_solver.counting import Array
from lmoffload_solver.in_turn import Steps, Turns
from lmoffload_solver.kv_homes import Transfers, layers_on_disk
from lmoffload_solver.layer_sets import LayerSets, Mix
from lmoffload_solver.matrix_kinds import LargestLayer, Streaming, kinds_of, layers_alike, streaming_of
from lmoffload_solver.memory import Parts
from lmoffload_solver.prices import Prices
from lmoffload_solver.program import Choices, ProgramStep, WeightClass
from lmoffload_solver.rounding import MOST_SUBSETS_OF, Level, Placement, Rounding, Stream
from lmoffload_solver.schedule import aligned_bytes
from lmoffload_solver.simulate import StagedStep, StepWork, pipeline, staged_pipeline
from lmoffload_solver.variants import Variant


@dataclass(frozen=True)
class Simulated:
    """Predicted seconds of the whole job, and of one decode step of a full block (mean)."""

    prefill_s: float
    decode_s: float
    step_s: float
    prefill_busy: tuple[float, float, float]
    """(reading, computing, writing)."""
    decode_busy: tuple[float, float, float]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


class Evaluator:
    """Prices candidates of one variant of a job."""

    def __init__(self, prices: Prices, variant: Variant) -> None:
        self.prices, self.variant = prices, variant
        self.machine, self.workload, self.capacity, self.tiers = prices.machine, prices.workload, prices.capacity, prices.tiers
        self.disk, self.io_threads = prices.disk, prices.io_threads
        model = self.model = prices.kept(variant)
        self.memory = prices.memory(variant.kv_format)
        self.roundings: dict[Stream, Rounding] = {"layer": Rounding(model, "layer"), "matrix": Rounding(model, "matrix")}
        self.head_bytes = counting.tensor_bytes(model.head)
        self.kinds = kinds_of(model)
        stored = max(sum(counting.tensor_bytes(t) for t in counting.layer_matrices(model, n)) for n in range(model.num_layers))
        aligned = max(ladder.whole for ladder in self.roundings["layer"].ladders)
        alike = layers_alike(model)
        self._has_sets = alike and len(counting.layer_matrices(model, 0)) <= MOST_SUBSETS_OF
        largest = LargestLayer(model.num_layers, stored, aligned, alike)
        self.streaming: dict[Stream, Streaming] = {
            "layer": streaming_of(self.kinds, "layer", largest, self.head_bytes, prices),
            "matrix": streaming_of(self.kinds, "matrix", largest, self.head_bytes, prices),
        }
        self.block_steps = cache(self._block_steps)
        self.sums, self.mixes = cache(self._sums), cache(self._mixes)
        self.layer_sets = cache(lambda stream: LayerSets(self.roundings[stream], prices))

    def room(self, candidate: Candidate, head_at_home: bool) -> int:
        """Bytes for homes and ring buffers of the matrices."""
        return self.prices.within_weights(self.capacity.memory_bytes - self.parts(candidate, head_at_home).total)

    def parts(self, candidate: Candidate, head_at_home: bool) -> Parts:
        """What else than the matrices takes memory."""
        sizes = candidate.micro_batch, candidate.num_micro_batches, candidate.threads
        cut = candidate.stream == "matrix"
        chunk, on_disk = candidate.prefill_chunk, candidate.kv_on_disk
        return self.memory.parts(*sizes, head_streams=not head_at_home, layers_cut=cut, prefill_chunk=chunk, kv_on_disk=on_disk)

    def kv_fits_disk(self, candidate: Candidate) -> bool:
        """Whether the disk has room for what a candidate keeps there."""
        return self.memory.kv.disk_bytes(candidate.micro_batch, candidate.block_rows, candidate.kv_on_disk) <= self.capacity.disk_bytes

    def job(self, threads: int) -> JobCosts:
        """Computing costs with a number of threads."""
        return self.prices.job(threads, self.variant)

    def bound_s(self, candidate: Candidate) -> float:
        """Seconds of the job that no placement of a candidate goes below (`bounds.Bounds`); infinite: none fits."""
        room, streaming = float(self.room(candidate, True)), self.streaming[candidate.stream]
        cases = cases_of(streaming.layers, streaming.head, room, (candidate.prefetch_depth,))
        sums, moved = self.sums(candidate)
        return float(bounds_s(sums, self.prices.costs(candidate.threads).contention, cases, [moved]).min())

    def _sums(self, candidate: Candidate) -> tuple[StepSums, tuple[Array, Array]]:
        """Computing, and (loads, stores)."""
        steps = self.program_steps(candidate)
        columns = [(s.weight, s.compute_s, float(s.early), s.layer_s, s.head_s) for s in steps]
        return StepSums(*np.array(columns).T), (np.array([s.load_s for s in steps]), np.array([s.store_s for s in steps]))

    def classes(self, stream: Stream) -> tuple[WeightClass, ...]:
        """The classes of the program: the kinds of matrices of the layers, the head, and the embedding table where it is not the head."""
        streaming, layers = self.streaming[stream], self.model.num_layers
        classes = []
        for number, (kind, one_s) in enumerate(zip(self.kinds, streaming.one_s, strict=True)):
            unit = float(kind.aligned) if stream == "matrix" else kind.aligned * kind.count / layers
            classes.append(WeightClass(f"{kind.tensor_class}.{number}", kind.aligned * kind.count, unit, one_s * kind.count, kind.count))
        classes.append(WeightClass("head", aligned_bytes(self.head_bytes), 0.0, streaming.head.read_s, looked_up=self.model.tied_head))
        if not self.model.tied_head:
            size = aligned_bytes(counting.tensor_bytes(self.model.embedding))
            classes.append(WeightClass("embedding", size, 0.0, 0.0, streams=False, looked_up=True))
        return tuple(classes)

    def program_choices(self, candidate: Candidate) -> Choices:
        """The linear program's constants for a candidate."""
        costs = self.prices.costs(candidate.threads)
        weights = self.capacity.weights_bytes
        return Choices(
            self.tiers,
            self.classes(candidate.stream),
            self.program_steps(candidate),
            candidate.stream,
            self.streaming[candidate.stream].layers,
            self.streaming[candidate.stream].head,
            candidate.prefetch_depth,
            costs.contention,
            self.capacity.memory_bytes - self.parts(candidate, True).total,
            None if weights is None else weights - self.memory.vectors_bytes,
        )

    def program_steps(self, candidate: Candidate) -> tuple[ProgramStep, ...]:
        """The sampled steps of all different blocks."""
        job = self.job(candidate.threads)
        blocks = self.prices.blocks(candidate.block_rows)
        transfers = self.prices.transfers(self.variant.kv_format).least(blocks, job.steps, candidate.micro_batch, candidate.kv_on_disk)
        staged = zip(*(seconds.tolist() for seconds in transfers), strict=True)
        found = []
        for number, block in enumerate(blocks):
            for step, seconds in zip(job.steps, self._steps_of(candidate, block), strict=True):
                early = step.step == 1 or (step.step == 0 and (number > 0 or block.count > 1))
                found.append(
                    ProgramStep(
                        f"{number}.{step.step}",
                        block.count * step.weight,
                        job.total(seconds, 1, False),
                        seconds.lookup,
                        early,
                        min(seconds.layers),
                        seconds.head,
                        *next(staged),
                    )
                )
        return tuple(found)

    def has_mixes(self, candidate: Candidate) -> bool:
        """Whether `mixes` are known: layers are alike, with every set of their matrices, and stream whole or through one buffer."""
        return self._has_sets and (candidate.stream == "layer" or not candidate.prefetch_depth)

    def _mixes(self, candidate: Candidate) -> list[Mix]:
        sums, (load, store) = self.sums(candidate)
        seconds = [one for block in self.prices.blocks(candidate.block_rows) for one in self._steps_of(candidate, block)]
        lookup, piece = (np.array(column) for column in zip(*((one.lookup, one.piece) for one in seconds), strict=True))
        steps = Steps(sums, lookup, piece, load, store, self._turns(candidate))
        rooms = {head_at_home: self.room(candidate, head_at_home) for head_at_home in (True, False)}
        return self.layer_sets(candidate.stream).mixes(rooms, candidate.prefetch_depth, self._contention(candidate), steps)

    def _turns(self, candidate: Candidate) -> tuple[Turns, ...] | None:
        """Of each block, what is loaded and stored of every layer in turn with computing it; None where layers differ in that."""
        if not candidate.kv_on_disk:
            return ()
        if candidate.kv_on_disk < self.model.num_layers or len(set(self.model.layers)) > 1:
            return None
        found = []
        for block in self.prices.blocks(candidate.block_rows):
            moved = self.prices.transfers(self.variant.kv_format).of(self.model.layers[0], block, candidate.micro_batch)
            batches = [self._steps_of(candidate, Block(*rows, 1)) for rows in block.micro_batches(candidate.micro_batch)]
            found.append(Turns.of(moved, [[min(one.layers) for one in batch] for batch in batches]))
        return tuple(found)

    def placements(self, candidate: Candidate) -> Iterator[Placement]:
        """Whole-tensor placements to simulate."""
        rounding, depth = self.roundings[candidate.stream], candidate.prefetch_depth
        mixes = self.mixes(candidate) if self.has_mixes(candidate) and not rounding.few else []
        for head_at_home in (True, False):
            room = self.room(candidate, head_at_home)
            if room >= 0 and self.kv_fits_disk(candidate):
                found = rounding.every(room, depth, head_at_home) if rounding.few else rounding.placements(room, depth, head_at_home)
                yield from found
                mixed = (self.layer_sets(candidate.stream).placed(mix, depth) for mix in mixes if mix.head_at_home == head_at_home)
                yield from (placement for placement in mixed if placement.memory_bytes <= room and placement not in found)

    def has_all(self, candidate: Candidate) -> bool:
        """Whether `placements` are all there are."""
        return self.roundings[candidate.stream].few

    def bounded_placements(self, candidate: Candidate) -> list[tuple[float, Placement]]:
        """The placements, each with a bound by the reads of its units, lowest first."""
        placements = list(self.placements(candidate))
        if not placements:
            return []
        depth = candidate.prefetch_depth
        reads = [self.reads(placement) for placement in placements]
        read = np.array([sum(of_step) for of_step in reads])
        largest = np.array([max(of_step) for of_step in reads])
        layers = np.array([float(sum(level.stored > 0 for level in p.layers)) for p in placements])
        at_home, beside = np.array([p.head_at_home for p in placements]), np.array(-np.inf) if depth else read
        beside_head = np.where(at_home, read - (depth + 1) * largest, beside)
        pieces = [of_step[-len(p.head_pieces) :] for of_step, p in zip(reads, placements, strict=True)]
        after_layers = np.array([sum(of_head) - (depth + 1) * max(of_head) for of_head in pieces])
        sums, (load, store) = self.sums(candidate)
        ahead = np.full(len(read), float(depth))
        waits = [sum(s for s, before in zip(of_step[1:], of_step[:-1], strict=True) if s and before) for of_step in reads]
        first = np.full(len(read), np.inf) if depth else read - np.array(waits)
        reading = Reading(ahead, read, (depth + 1) * largest, layers, first, beside_head, after_layers, load[None], store[None])
        bounds = reading_bound_s(sums, self._contention(candidate), reading)
        return sorted(zip(bounds.tolist(), placements, strict=True), key=lambda pair: pair[0])

    def reads(self, placement: Placement) -> list[float]:
        """Seconds to read what each unit of a step streams, alone."""
        of_level: dict[Level, list[float]] = {}
        found = [0.0]
        for level in placement.layers:
            if level not in of_level:
                of_level[level] = [self.prices.read_seconds(p.stored, p.requests) if p.stored else 0.0 for p in level.parts]
            found += of_level[level]
        return found + [self.prices.read_seconds(size, num_requests([size])) if size else 0.0 for size in placement.head_pieces]

    def simulate(self, candidate: Candidate, placement: Placement) -> Simulated:
        """The job's times: every different block's sampled steps one after another, a repeated block twice (the second time the ring is
        already full), each step weighted with what it stands for."""
        blocks = self.prices.blocks(candidate.block_rows)
        streams, reads = placement.streams, self.reads(placement)
        steps = self.job(candidate.threads).steps
        work: list[list[StagedStep]] = []
        weights, full = [], []
        for number, block in enumerate(blocks):
            of_block = self._block_work(candidate, placement, block, reads)
            for count in (1,) if block.count == 1 else (1, block.count - 1):
                work.append(of_block)
                weights.extend([count * step.weight for step in steps])
                full.extend([number == 0] * len(steps))
        flat = [step for of_block in work for step in of_block]
        if candidate.kv_on_disk:
            ends = np.array(staged_pipeline(work, streams, placement.slots))
        else:
            ends = np.array(pipeline([step.work for step in flat], streams, placement.slots))
        spans = np.diff(ends, prepend=0.0) * weights
        decode = np.arange(len(flat)) % len(steps) > 0
        busy = np.array([[sum(s.work.read_s) + sum(s.load_s), sum(s.work.compute_s), sum(s.store_s)] for s in flat])
        busy *= np.array(weights)[:, None]
        prefill_busy, decode_busy = (busy[phase].sum(axis=0).tolist() for phase in (~decode, decode))
        full_steps = (self.workload.gen_len - 1) * blocks[0].count
        return Simulated(
            float(spans[~decode].sum()),
            float(spans[decode].sum()),
            float(spans[decode & np.array(full)].sum() / full_steps) if full_steps else 0.0,
            tuple(prefill_busy),
            tuple(decode_busy),
        )

    def _block_work(self, candidate: Candidate, placement: Placement, block: Block, reads: list[float]) -> list[StagedStep]:
        """The sampled steps of a block."""
        steps, on_disk = self.job(candidate.threads).steps, layers_on_disk(self.model.num_layers, candidate.kv_on_disk)
        transfers = self.prices.transfers(self.variant.kv_format)
        moved = [transfers.of(self.model.layers[layer], block, candidate.micro_batch) for layer in on_disk]
        batches = [Block(first, end, 1) for first, end in block.micro_batches(candidate.micro_batch)] if on_disk else []
        of_batches = [self._steps_of(candidate, batch) for batch in batches]
        found = []
        for place, seconds in enumerate(self._steps_of(candidate, block)):
            found.append(self._staged(candidate, placement, seconds, reads, moved, [one[place] for one in of_batches], place, len(steps)))
        return found

    def _staged(
        self,
        candidate: Candidate,
        placement: Placement,
        seconds: StepSeconds,
        reads: list[float],
        moved: Sequence[Transfers],
        batches: Sequence[StepSeconds],
        place: int,
        num_steps: int,
    ) -> StagedStep:
        """The `place`-th sampled step: loads come with every one but the prefill, stores with every one but the last."""
        load = [one for of_layer in moved for one in of_layer.load] if place else []
        work = self.step_work(candidate, placement, seconds, reads, sum(load))
        read_scale, compute_scale = work.slowed
        job, layers = self.job(candidate.threads), layers_on_disk(self.model.num_layers, candidate.kv_on_disk)
        batches_s = {1 + n: tuple(one.layers[job.kind_of_layer[n]] * compute_scale for one in batches) for n in layers}
        store = [one for of_layer in moved for one in (of_layer.add if place else of_layer.make)] if place + 1 < num_steps else []
        return StagedStep(work, batches_s, tuple(one * read_scale for one in load), tuple(store))

    def _contention(self, candidate: Candidate) -> Contention:
        """Nothing overlaps for long without read-ahead; loads of keys and values are ahead always."""
        ahead = candidate.prefetch_depth or (candidate.kv_on_disk and self.workload.gen_len > 1)
        return self.prices.costs(candidate.threads).contention if ahead else Contention()

    def step_work(self, candidate: Candidate, placement: Placement, seconds: StepSeconds, reads: list[float], load_s: float) -> StepWork:
        """Seconds by unit of one step, slowed where reading, `load_s` of keys and values included, and computing run at once."""
        job = self.job(candidate.threads)
        compute = [seconds.lookup if not placement.embedding_at_home else 0.0]
        of_level: dict[tuple[int, Level], list[float]] = {}
        for layer, level in enumerate(placement.layers):
            key = (job.kind_of_layer[layer], level)
            if key not in of_level:
                of_level[key] = [job.part_seconds(layer, seconds, part.computes, part.computes[0] == 0) for part in level.parts]
            compute += of_level[key]
        head = [seconds.head * (size / self.head_bytes if size else 1.0) + seconds.piece for size in placement.head_pieces]
        head[-1] += seconds.around
        compute += head
        slow = self._contention(candidate)
        read_sum, compute_sum = sum(reads) + load_s, sum(compute)
        read_slow, compute_slow = slow.stretched(read_sum, compute_sum) if read_sum else (0.0, compute_sum)
        read_scale, compute_scale = read_slow / read_sum if read_sum else 1.0, compute_slow / compute_sum
        return StepWork(tuple(r * read_scale for r in reads), tuple(c * compute_scale for c in compute), (read_scale, compute_scale))

    def _steps_of(self, candidate: Candidate, block: Block) -> tuple[StepSeconds, ...]:
        threads, size, cut = candidate.threads, candidate.micro_batch, candidate.stream == "matrix"
        prefill = self.block_steps(threads, block, size, "prefill", candidate.prefill_kernel, candidate.prefill_chunk, cut)
        decode = self.block_steps(threads, block, size, "decode", candidate.decode_kernel, None, cut)
        return (*prefill, *decode)

    def _block_steps(
        self, threads: int, block: Block, micro_batch: int, phase: Phase, kernel: str, prefill_chunk: int | None, cut: bool
    ) -> tuple[StepSeconds, ...]:
        return self.job(threads).steps_seconds(block, micro_batch, phase, kernel, prefill_chunk, cut=cut)

