"""The search for machines with a device: every discrete choice bounded in closed form, the program for what survives, rounding, simulation
in order of the bound until no bound left is better than the best simulated plan."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.chain_bounds import closed_form_s
from lmoffload_solver.chain_predict import ChainSimulated, simulate_chain
from lmoffload_solver.chain_program import ChainChoices, ChainProgram, ChainSolution
from lmoffload_solver.chain_rounding import WeightPlacer, every_placement, kv_placements
from lmoffload_solver.chain_terms import PLACES, ChainTerms, StepTerms
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.device_memory import ChainMemory
from lmoffload_solver.formats import FORMATS, format_of
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.runtime import own_runtime
from lmoffload_solver.value import Quality, TensorClass, Tier
from lmoffload_solver.workload import Limits

MOST_MICRO_BATCHES = 24
DEPTHS = (1, 2, 0)
HIDDEN: tuple[Tier, ...] = ("device", "host")
ALL_TIERS: tuple[Tier, ...] = ("device", "host", "disk")
MOST_PROGRAMS = 40
PROOF = 0.005
"""The search ends when nothing left can be quicker by more than this share; the plan's gap says what it is."""
SAME = 1e-9
TIED = 1e-6
"""Relative difference of bounds that are taken for equal."""

WEIGHT_FORMATS: dict[Quality, tuple[str, ...]] = {
    "exact": (),
    "int8": ("int8",),
    "int4": ("int8", "int4-g64"),
    "any": ("int8", "int4-g128"),
}
"""What a class of tensors may be turned into. Of int4's groups the larger is never slower, so each class has one."""


@dataclass(frozen=True)
class ChainCandidate:
    """The discrete choices."""

    micro_batch: int
    num_micro_batches: int
    formats: tuple[tuple[TensorClass, str], ...]
    kv_format: str
    hidden: Tier
    prefetch_depth: int


@dataclass(frozen=True)
class ChainFound:
    """A decision with what it comes to."""

    decision: Decision
    simulated: ChainSimulated
    candidate: ChainCandidate
    program_s: float | None = None


class ChainSearch:
    """Best first over the domain."""

    def __init__(
        self, job: Job, machine: MachineProfile, disk: Disk, limits: Limits, quality: Quality, deadline: float, *, proof: float = PROOF
    ) -> None:
        self.job, self.machine, self.limits, self.quality, self.deadline = job, machine, limits, quality, deadline
        self.costs = DeviceCosts(machine, disk, own_runtime())
        self.terms = ChainTerms(job, self.costs)
        self.memory = ChainMemory(job, machine, limits)
        self.model = job.model
        self.base_format = "fp16" if counting.main_format(self.model) not in ("bf16", "fp16") else counting.main_format(self.model)
        self.proof = max(proof, SAME)
        self.programs_solved = 0
        self.simulated = 0
        self.cut_short = False
        self.bound_s = float("inf")
        self.sizes = cache(lambda formats: self.terms.sizes(dict(formats)))
        self.placer = cache(lambda formats: WeightPlacer(self.model, dict(formats)))
        self.steps = cache(self._steps)
        self.packed = cache(lambda size, count, formats: self.terms.packed_s(size, count, dict(formats)))

    # The domain

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(micro-batch, number of micro-batches)."""
        num = self.job.num_prompts
        fixed_size, fixed_count = self.limits.micro_batch, self.limits.num_micro_batches
        for size in grid(num, num) if fixed_size is None else (min(fixed_size, num),):
            most = -(-num // size)
            yield from ((size, count) for count in (grid(most, MOST_MICRO_BATCHES) if fixed_count is None else (min(fixed_count, most),)))

    def weight_formats(self) -> list[tuple[tuple[TensorClass, str], ...]]:
        """Formats by class of the layers' matrices, the stored ones left out."""
        allowed = (None, *WEIGHT_FORMATS[self.quality])
        classes = list(self.terms.classes)
        found = []
        for chosen in product(allowed, repeat=len(classes)):
            named = tuple((name, fmt) for name, fmt in zip(classes, chosen, strict=True) if fmt is not None)
            if all(self._can_be(name, fmt) for name, fmt in named):
                found.append(named)
        return found

    def kv_formats(self) -> tuple[str, ...]:
        """Formats of keys and values."""
        return (self.base_format, *WEIGHT_FORMATS[self.quality])

    def _can_be(self, name: TensorClass, fmt: str) -> bool:
        block = format_of(fmt).block_elements
        return all(shape[-1] % block == 0 and stored in FORMATS for _, stored, shape in self.terms.classes[name])

    def _steps(self, size: int, count: int, kv_format: str) -> tuple[StepTerms, ...]:
        return self.terms.steps(size, count, kv_format, "host")

    # Bounds

    def rooms(self, candidate: ChainCandidate) -> dict[Tier, float]:
        """Bytes of each tier for homes and buffers of weights and KV."""
        transients = self.memory.transients(self.decision(candidate, {}, ()))
        return {
            "device": self.memory.capacity["device"] - sum(transients.device.values()),
            "host": self.memory.capacity["host"] - sum(transients.host.values()),
            "disk": float(self.memory.capacity["disk"]),
        }

    def bounds(self) -> Iterator[tuple[float, ChainCandidate]]:
        """Closed-form bound of every candidate that may fit."""
        weights = self.weight_formats()
        depths = np.array(DEPTHS, dtype=np.float64)
        for (size, count), kv_format in product(self.pairs(), self.kv_formats()):
            kv_bytes = self.memory.kv_token_bytes(kv_format) * min(size * count, self.job.num_prompts)
            for hidden in HIDDEN:
                steps: tuple[StepTerms, ...] | None = None
                for formats in weights:
                    candidate = ChainCandidate(size, count, formats, kv_format, hidden, 1)
                    rooms = self.rooms(candidate)
                    sizes = self.sizes(formats)
                    if rooms["device"] < 0 or rooms["host"] < 0:
                        continue
                    slots = (depths + 1) * (sizes.in_layers / self.model.num_layers)
                    total = sum(sizes.classes.values())
                    if total + kv_bytes > sum(rooms.values()):
                        continue
                    if steps is None:
                        steps = self.steps(size, count, kv_format)
                    values = closed_form_s(self.terms, self.packed(size, count, formats), total, kv_bytes, rooms, steps, hidden == "host")
                    all_home = total + kv_bytes <= rooms["device"]
                    for place, depth in enumerate(DEPTHS):
                        if total > rooms["device"] and slots[place] > rooms["device"] + kv_bytes:
                            continue
                        if all_home and depth != DEPTHS[0]:
                            continue
                        chosen = ChainCandidate(size, count, formats, kv_format, hidden, depth)
                        yield values, chosen

    def on_disk(self, candidate: ChainCandidate) -> bool:
        """Whether device and host cannot hold all."""
        rows = min(candidate.micro_batch * candidate.num_micro_batches, self.job.num_prompts)
        rooms = self.rooms(candidate)
        needed = sum(self.sizes(candidate.formats).classes.values()) + self.memory.kv_token_bytes(candidate.kv_format) * rows
        return needed > rooms["device"] + rooms["host"]

    def choices(self, candidate: ChainCandidate) -> ChainChoices:
        """The program's constants."""
        steps = self.steps(candidate.micro_batch, candidate.num_micro_batches, candidate.kv_format)
        if candidate.hidden == "device":
            steps = tuple(replace(step, load_hidden=0.0, store_hidden=0.0) for step in steps)
        sizes = self.sizes(candidate.formats)
        rows = min(candidate.micro_batch * candidate.num_micro_batches, self.job.num_prompts)
        kv_bytes = self.memory.kv_token_bytes(candidate.kv_format) * rows
        placer = self.placer(candidate.formats)
        rooms = {tier: room - placer.other_bytes[tier] for tier, room in self.rooms(candidate).items()}
        total = sum(sizes.classes.values())
        return ChainChoices(
            sizes,
            steps,
            self.packed(candidate.micro_batch, candidate.num_micro_batches, candidate.formats),
            self.model.num_layers,
            candidate.prefetch_depth,
            kv_bytes,
            rooms,
            self.terms.upload_rate,
            self.costs.read_rate,
            self.terms.contention,
            disk_kv=total + kv_bytes > rooms["device"] + rooms["host"],
        )

    # Whole plans

    def decision(self, candidate: ChainCandidate, homes: dict[str, Tier], kv: tuple[tuple[KVUnit, ...], ...]) -> Decision:
        """The decision of a candidate and its placement."""
        return Decision(
            micro_batch=candidate.micro_batch,
            num_micro_batches=candidate.num_micro_batches,
            formats=dict(candidate.formats),
            homes=homes,
            kv_format=candidate.kv_format,
            kv=kv,
            hidden=candidate.hidden,
            prefetch_depth=candidate.prefetch_depth,
            runtime=self.costs.runtime,
        )

    def rounded(self, candidate: ChainCandidate, solution: ChainSolution) -> Iterator[Decision]:
        """Whole-tensor, whole-unit decisions near the program's optimum."""
        placer = self.placer(candidate.formats)
        disk = self.on_disk(candidate)
        everything = every_placement(
            self.model, candidate.num_micro_batches, ALL_TIERS if disk else HIDDEN, PLACES if disk else PLACES[:3], placer.others
        )
        if everything is not None:
            decisions = (self.decision(candidate, homes, kv) for homes, kv in everything)
            yield from (decision for decision in decisions if self.memory.fits(decision))
            return
        for kv in kv_placements(solution.kv, self.model.num_layers, candidate.num_micro_batches):
            bare = self.decision(candidate, {t.name: "disk" for t in self.model.tensors if t.is_matrix}, kv)
            parts = self.memory.parts(bare)
            rooms = {
                tier: self.memory.capacity[tier] - sum(size for name, size in parts[tier].items() if not name.startswith("weight"))
                for tier in HIDDEN
            }
            placed = placer.fill(rooms["device"], rooms["host"], bare.num_buffers)
            if placed is not None:
                decision = self.decision(candidate, placed.homes, kv)
                if self.memory.fits(decision):
                    yield decision

    def run(self) -> ChainFound | None:
        """The best plan; None where nothing fits, or the time is over before anything was simulated."""
        heap = [self._entry(bound, candidate, number) for number, (bound, candidate) in enumerate(self.bounds())]
        heapq.heapify(heap)
        self.candidates = len(heap)
        best: ChainFound | None = None
        while heap:
            (bound, _, _, number), candidate, solution = heapq.heappop(heap)
            self.bound_s = bound
            if best is not None and bound >= best.simulated.total_s * (1 - self.proof):
                break
            if time.perf_counter() > self.deadline:
                self.cut_short = True
                return best
            if solution is None:
                self.programs_solved += 1
                solution = ChainProgram(self.choices(candidate)).solve()
                if solution is not None:
                    heapq.heappush(heap, self._entry(max(bound, solution.total_s), candidate, number, solution))
                if solution is None or not self._is_due(best):
                    continue
            for decision in self.rounded(candidate, solution):
                simulated = simulate_chain(self.job, self.costs, decision)
                self.simulated += 1
                if best is None or simulated.total_s < best.simulated.total_s * (1 - SAME):
                    best = ChainFound(decision, simulated, candidate, solution.total_s)
        else:
            self.bound_s = best.simulated.total_s if best is not None else float("inf")
        return best


    def _is_due(self, best: ChainFound | None) -> bool:
        """Simulate at once, out of turn: now and then, so that there is a plan to hold bounds against, and to return when time is over."""
        return self.programs_solved & (self.programs_solved - 1) == 0 or (best is None and self.programs_solved % 8 == 0)

    def _entry(
        self, bound: float, candidate: ChainCandidate, number: int, solution: ChainSolution | None = None
    ) -> tuple[tuple[float, int, int, int], ChainCandidate, ChainSolution | None]:
        """An entry of the heap: of equal bounds first the one that keeps everything as stored, then the smallest."""
        lossy = len(candidate.formats) + (candidate.kv_format != self.base_format)
        rounded = float(f"{bound * (1 - TIED):.6g}")
        return (min(bound, rounded), int(lossy > 0), sum(self.sizes(candidate.formats).classes.values()), number), candidate, solution


def grid(total: int, most: int) -> tuple[int, ...]:
    """2^i and 3·2^i up to `total` and `most`, and `total` cut into 1 to 4 equal parts, ascending."""
    sizes = {factor << i for factor in (1, 3) for i in range(total.bit_length())}
    sizes |= {-(-total // parts) for parts in range(1, 5)}
    return tuple(sorted(size for size in sizes if size <= min(total, most)))
