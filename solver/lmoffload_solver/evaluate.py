"""What a candidate costs: its bound, its whole-tensor placements and their simulated times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.blocks import Block, JobCosts, StepSeconds, blocks_of, lengths_of
from lmoffload_solver.costs import Array, Contention, DiskCosts, MachineCosts, Phase, chain_of, num_requests
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.memory import Capacity, JobMemory, Parts
from lmoffload_solver.model import ModelShape
from lmoffload_solver.program import Choices, ProgramStep, WeightClass
from lmoffload_solver.rounding import Placement, Rounding, Stream
from lmoffload_solver.simulate import StepWork, pipeline
from lmoffload_solver.threads import disk_threads
from lmoffload_solver.workload import Limits, Workload


@dataclass(frozen=True)
class Candidate:
    """The discrete choices."""

    micro_batch: int
    num_micro_batches: int
    threads: int
    prefill_kernel: str
    decode_kernel: str
    prefetch_depth: int
    stream: Stream = "layer"

    @property
    def block_rows(self) -> int:
        return self.micro_batch * self.num_micro_batches


@dataclass(frozen=True)
class Simulated:
    """Predicted seconds of the whole job, and of one decode step of a full block (mean)."""

    prefill_s: float
    decode_s: float
    step_s: float
    prefill_busy: tuple[float, float]
    """(reading, computing)."""
    decode_busy: tuple[float, float]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


class Evaluator:
    """Prices candidates of one job on one machine."""

    def __init__(self, model: ModelShape, machine: MachineProfile, disk: Disk, workload: Workload, limits: Limits) -> None:
        self.model, self.machine, self.workload = model, machine, workload
        self.capacity = Capacity.of(model, machine, limits)
        self.memory = JobMemory(model, workload, machine.base_bytes)
        self.roundings: dict[Stream, Rounding] = {"layer": Rounding(model, "layer"), "matrix": Rounding(model, "matrix")}
        self._least_bytes = min(rounding.least().memory_bytes for rounding in self.roundings.values())
        self.head_bytes = counting.tensor_bytes(model.head)
        self.io_threads = disk_threads(disk)
        self.tiers = chain_of(machine)
        self.classes: dict[Stream, tuple[WeightClass, ...]] = {"layer": _classes(model, "layer"), "matrix": _classes(model, "matrix")}
        self.largest_unit: dict[Stream, int] = {
            stream: max(level.largest_part for ladder in rounding.ladders for level in ladder.levels)
            for stream, rounding in self.roundings.items()
        }
        self.vectors_bytes = self.memory.vectors_bytes
        self.disk = DiskCosts(disk, self.io_threads)
        lengths = lengths_of(workload)
        self.job = cache(lambda threads: JobCosts(model, workload, MachineCosts(machine, self.disk, threads)))
        self.blocks = cache(lambda block_rows: blocks_of(lengths, block_rows))
        self.block_steps = cache(self._block_steps)
        self.read_seconds = cache(self.disk.read_seconds)

    def room(self, candidate: Candidate, head_at_home: bool) -> int:
        """Bytes for homes and ring buffers of the matrices."""
        return self.within_weights(self.capacity.memory_bytes - self.parts(candidate, head_at_home).total)

    def parts(self, candidate: Candidate, head_at_home: bool) -> Parts:
        """What else than the matrices takes memory."""
        sizes = candidate.micro_batch, candidate.num_micro_batches, candidate.threads
        return self.memory.parts(*sizes, head_streams=not head_at_home, layers_cut=candidate.stream == "matrix")

    def all_fits(self, candidate: Candidate) -> bool:
        """Nothing need stream."""
        (rounding, *_) = self.roundings.values()
        return rounding.all_bytes <= self.room(candidate, True)

    def may_fit(self, micro_batch: int, num_micro_batches: int, threads: int) -> bool:
        """False where even the least placement leaves too little: nothing of such a block need be priced."""
        parts = self.memory.parts(micro_batch, num_micro_batches, threads, head_streams=False, layers_cut=False)
        return parts.total + self._least_bytes <= self.capacity.memory_bytes

    def within_weights(self, memory_bytes: int) -> int:
        """The user's limit on weights applied."""
        weights = self.capacity.weights_bytes
        return memory_bytes if weights is None else min(memory_bytes, weights - self.vectors_bytes)

    def kernels(self, micro_batch: int, num_micro_batches: int, threads: int, phase: Phase) -> tuple[str, ...]:
        """The kernels of a phase worth considering: one that is nowhere quicker than another needs no candidate of its own."""
        known = self.job(threads).costs.linear.kernels(counting.main_format(self.model))
        if len(known) == 1:
            return known
        blocks = self.blocks(micro_batch * num_micro_batches)
        times = {
            kernel: np.array(
                [
                    (*seconds.layers, seconds.head)
                    for block in blocks
                    for seconds in self.block_steps(threads, block, micro_batch, phase, kernel)
                ]
            )
            for kernel in known
        }
        kept: list[str] = []
        for kernel in sorted(known, key=lambda name: float(times[name].sum())):
            if not any((times[other] <= times[kernel]).all() for other in kept):
                kept.append(kernel)
        return tuple(kept)

    def bound_s(self, candidate: Candidate, depths: Array) -> Array:
        """Seconds of the job that no placement goes below, for each prefetch depth: the program solved by hand. Infinite: does not fit.

        Reading is the same for all steps, so the least streamed bytes Q are best: W − Q bytes stay at home and the ring takes
        (depth + 1)·(Q − head)/(units of all layers), within the room M. See `program.Program` for the rows.
        """
        room = self.room(candidate, True)
        least = self._least_streamed(candidate.stream, room, depths)
        fits = np.isfinite(least)
        if not fits.any():
            return np.full(len(depths), np.inf)
        return np.asarray(np.where(fits, self._streaming_bound_s(candidate, depths, np.where(fits, least, 0.0)), np.inf))

    def _streaming_bound_s(self, candidate: Candidate, depths: Array, streamed: Array) -> Array:
        """Seconds of the job that streaming so many bytes per step does not go below: the rows of `program.Program`."""
        costs = self.job(candidate.threads).costs
        read = streamed / costs.disk.best_read_rate
        largest = self.largest_unit[candidate.stream]
        early = (depths + 1) * largest / costs.disk.best_read_rate
        layers = np.maximum(0.0, streamed - self.head_bytes) / largest
        slow = costs.contention
        total = np.zeros(len(depths))
        for step in self.program_steps(candidate):
            reading = read - early if step.early else read
            ahead = np.maximum(
                reading + step.compute_s * slow.compute * (1 - 1 / slow.read), step.compute_s + reading * slow.read * (1 - 1 / slow.compute)
            )
            serial = reading + layers * step.layer_s
            total += step.weight * np.maximum(step.compute_s, np.where(depths > 0, ahead, serial))
        return total

    def program_choices(self, candidate: Candidate) -> Choices:
        """The linear program's constants for a candidate."""
        costs = self.job(candidate.threads).costs
        weights = self.capacity.weights_bytes
        return Choices(
            self.tiers,
            self.classes[candidate.stream],
            self.program_steps(candidate),
            candidate.stream,
            self.largest_unit[candidate.stream],
            candidate.prefetch_depth,
            costs.disk.best_read_rate,
            costs.contention,
            self.capacity.memory_bytes - self.parts(candidate, True).total,
            None if weights is None else weights - self.vectors_bytes,
        )

    def program_steps(self, candidate: Candidate) -> tuple[ProgramStep, ...]:
        """The sampled steps of all different blocks."""
        job = self.job(candidate.threads)
        blocks = self.blocks(candidate.block_rows)
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
                        min(seconds.layers) if candidate.stream == "layer" else 0.0,
                    )
                )
        return tuple(found)

    def placements(self, candidate: Candidate) -> Iterator[Placement]:
        """Whole-tensor placements to simulate."""
        for head_at_home in (True, False):
            room = self.room(candidate, head_at_home)
            if room >= 0:
                yield from self.roundings[candidate.stream].placements(room, candidate.prefetch_depth, head_at_home)

    def bounded_placements(self, candidate: Candidate) -> list[tuple[float, Placement]]:
        """The placements, each with a bound by the bytes it streams, lowest first."""
        placements = list(self.placements(candidate))
        streamed = np.array([placement.streamed_bytes for placement in placements], dtype=np.float64)
        bounds = self._streaming_bound_s(candidate, np.full(len(placements), float(candidate.prefetch_depth)), streamed)
        return sorted(zip(bounds.tolist(), placements, strict=True), key=lambda pair: pair[0])

    def simulate(self, candidate: Candidate, placement: Placement) -> Simulated:
        """The job's times: every different block's sampled steps one after another, a repeated block twice (the second time the ring is
        already full), each step weighted with what it stands for."""
        blocks = self.blocks(candidate.block_rows)
        streams = placement.streams
        work, weights, full = [], [], []
        for number, block in enumerate(blocks):
            steps = [self.step_work(candidate, placement, seconds) for seconds in self._steps_of(candidate, block)]
            for count in (1,) if block.count == 1 else (1, block.count - 1):
                work.extend(steps)
                weights.extend([count * step.weight for step in self.job(candidate.threads).steps])
                full.extend([number == 0] * len(steps))
        ends = np.array(pipeline(work, streams, placement.slots))
        spans = np.diff(ends, prepend=0.0) * weights
        decode = np.arange(len(work)) % len(self.job(candidate.threads).steps) > 0
        read = np.array([sum(step.read_s) for step in work]) * weights
        compute = np.array([sum(step.compute_s) for step in work]) * weights
        full_steps = (self.workload.gen_len - 1) * blocks[0].count
        return Simulated(
            float(spans[~decode].sum()),
            float(spans[decode].sum()),
            float(spans[decode & np.array(full)].sum() / full_steps) if full_steps else 0.0,
            (float(read[~decode].sum()), float(compute[~decode].sum())),
            (float(read[decode].sum()), float(compute[decode].sum())),
        )

    def step_work(self, candidate: Candidate, placement: Placement, seconds: StepSeconds) -> StepWork:
        """Seconds by unit of one step, slowed where reading and computing run at once."""
        job = self.job(candidate.threads)
        parts = [(layer, part) for layer, level in enumerate(placement.layers) for part in level.parts]
        read = [0.0, *(self.read_seconds(part.stored, part.requests) if part.stored else 0.0 for _, part in parts)]
        read += [self.read_seconds(size, num_requests([size])) if size else 0.0 for size in placement.head_pieces]
        head = [seconds.head * (size / self.head_bytes if size else 1.0) + seconds.piece for size in placement.head_pieces]
        head[-1] += seconds.around
        layers = (job.part_seconds(layer, seconds, part.computes, part.computes[0] == 0) for layer, part in parts)
        compute = [seconds.lookup if not placement.embedding_at_home else 0.0, *layers, *head]
        slow = job.costs.contention if candidate.prefetch_depth else Contention()
        read_sum, compute_sum = sum(read), sum(compute)
        read_slow, compute_slow = slow.stretched(read_sum, compute_sum) if read_sum else (0.0, compute_sum)
        read_scale = read_slow / read_sum if read_sum else 1.0
        compute_scale = compute_slow / compute_sum
        return StepWork(tuple(r * read_scale for r in read), tuple(c * compute_scale for c in compute))

    def _steps_of(self, candidate: Candidate, block: Block) -> tuple[StepSeconds, ...]:
        prefill = self.block_steps(candidate.threads, block, candidate.micro_batch, "prefill", candidate.prefill_kernel)
        decode = self.block_steps(candidate.threads, block, candidate.micro_batch, "decode", candidate.decode_kernel)
        return (*prefill, *decode)

    def _block_steps(self, threads: int, block: Block, micro_batch: int, phase: Phase, kernel: str) -> tuple[StepSeconds, ...]:
        return self.job(threads).steps_seconds(block, micro_batch, phase, kernel)

    def _least_streamed(self, stream: Stream, room: int, depths: Array) -> Array:
        """Q for each depth; infinite where even a full stream does not fit."""
        units, head = self.roundings[stream].num_units, self.head_bytes
        total = head + sum(c.num_bytes for c in self.classes[stream] if c.unit_bytes)
        excess = float(total - room)
        if excess <= 0:
            return np.zeros(len(depths))
        if excess <= head:
            return np.full(len(depths), excess)
        share = (depths + 1) / units
        with np.errstate(divide="ignore", invalid="ignore"):
            streamed = np.where(share < 1, (excess - share * head) / (1 - share), np.inf)
        return np.asarray(np.where(streamed <= total, streamed, np.inf))


def _classes(model: ModelShape, stream: Stream) -> tuple[WeightClass, ...]:
    """The classes of the program: those of the layers, the head, and the embedding table where it is not the head."""
    sizes: dict[str, list[int]] = {}
    for layer in range(model.num_layers):
        for tensor in counting.layer_matrices(model, layer):
            sizes.setdefault(tensor.tensor_class, []).append(counting.tensor_bytes(tensor))
    units = {name: len(of_class) if stream == "matrix" else model.num_layers for name, of_class in sizes.items()}
    classes = [WeightClass(name, sum(of_class), sum(of_class) / units[name]) for name, of_class in sizes.items()]
    classes.append(WeightClass("head", counting.tensor_bytes(model.head), 0.0, looked_up=model.tied_head))
    if not model.tied_head:
        classes.append(WeightClass("embedding", counting.tensor_bytes(model.embedding), 0.0, streams=False, looked_up=True))
    return tuple(classes)
