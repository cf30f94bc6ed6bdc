"""The search for machines with a device: every discrete choice bounded in closed form, the program for what survives, rounding, simulation
in order of the bound until no bound left is better than the best simulated plan."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from lmoffload_solver.chain_domain import ChainCandidate, ChainDomain
from lmoffload_solver.chain_predict import ChainSimulated, Simulation
from lmoffload_solver.chain_prices import BatchPrices
from lmoffload_solver.chain_program import ChainProgram, ChainSolution
from lmoffload_solver.chain_rounding import every_placement, kv_placements, kv_shares
from lmoffload_solver.chain_solver import placed_s, solve_program
from lmoffload_solver.chain_terms import PLACES
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.host_cores import HostShare
from lmoffload_solver.loss import LossTable
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.pipeline import ALONE, Pipeline, splits
from lmoffload_solver.value import Quality, Tier
from lmoffload_solver.workload import Limits

EFFORT = 100.0
"""In programs solved: how much the search does for a proof without a gap."""
PROOF = 0.005
"""The share by which what is left may be quicker when as much effort again was taken; it grows as long as the search goes on. The plan's
gap says what was proven."""
MOST_OPEN = 0.04
"""The most that is left open, whatever effort that takes within the time limit."""
SAME = 1e-9
"""Relative difference of two times that is rounding of floating point."""
TIED = 1e-6
"""Relative difference of bounds that are taken for equal."""
A_SIMULATION, A_TASK = 3.0, 0.034
"""Effort of a simulation, and of each (unit, micro-batch) pair that it lays out: the time they take, in that of a program."""


@dataclass(frozen=True)
class ChainFound:
    """A decision with what it comes to."""

    decision: Decision
    simulated: ChainSimulated
    candidate: ChainCandidate


class Key(NamedTuple):
    """The order of the search: of equal bounds first what keeps everything as stored, then the smallest."""

    seconds: float
    """The bound, rounded, so that nearly equal ones are equal."""
    lossy: int
    """Parts that are not kept as stored."""
    num_bytes: int
    number: int
    bound_s: float


class ChainSearch:
    """Best first over the domain."""

    def __init__(
        self,
        job: Job,
        machine: MachineProfile,
        disk: Disk,
        limits: Limits,
        quality: Quality,
        deadline: float,
        *,
        effort: float = EFFORT,
        losses: LossTable | None = None,
    ) -> None:
        """`effort`: what is spent on a proof without a gap, in programs solved; `math.inf`: all that it takes."""
        self.job, self.machine, self.disk, self.deadline, self.most_effort = job, machine, disk, deadline, effort
        self.domain = ChainDomain(job, machine, disk, limits, quality, losses)
        self.memory, self.model = self.domain.memory, job.model
        self.programs_solved = 0
        self.effort = 0.0
        self.cut_short = False
        self.bound_s = float("inf")
        """Seconds that nothing left goes below."""
        self.costs = cache(self._costs)
        self._prices = cache(self._batch_prices)

    def run(self) -> ChainFound | None:
        """The best plan; None where nothing fits, or the time is over before anything was simulated."""
        waiting = self.domain.bounded()
        following = next(waiting, None)
        solved: list[tuple[Key, ChainCandidate, ChainProgram, ChainSolution]] = []
        best: ChainFound | None = None
        while following is not None or solved:
            is_open = following is not None and (not solved or following.seconds <= solved[0][0].seconds)
            self.bound_s = following.seconds if following is not None and is_open else solved[0][0].bound_s
            if best is not None and self.bound_s >= best.simulated.total_s * (1 - self._tolerance()):
                break
            if time.perf_counter() > self.deadline:
                self.cut_short = True
                return best
            if following is not None and is_open:
                for candidate in self.domain.open(following.candidate):
                    if best is not None and self.domain.least_s(candidate) >= best.simulated.total_s * (1 - SAME):
                        continue
                    program = ChainProgram(self.domain.choices(candidate))
                    solution = self._solve(program)
                    if solution is None:
                        continue
                    key = self._key(max(following.seconds, solution.total_s), candidate)
                    heapq.heappush(solved, (key, candidate, program, solution))
                    if self._is_due(best):
                        best = self._better(best, candidate, program, solution)
                following = next(waiting, None)
            else:
                _, candidate, program, solution = heapq.heappop(solved)
                best = self._better(best, candidate, program, solution)
        else:
            self.bound_s = float("inf")
        best = self._polished(best)
        if best is not None and self.bound_s >= best.simulated.total_s * (1 - SAME):
            self.bound_s = best.simulated.total_s
        return best

    def _polished(self, best: ChainFound | None) -> ChainFound | None:
        """The best plan, or the same with the first layer whole on the device where that is quicker."""
        if best is None:
            return None
        costs, prices = self.costs(best.candidate.assignment, best.candidate.num_micro_batches), self._prices(best.candidate)
        for decision in self._placed(best.candidate, best.decision.kv, best.decision.pipeline, first_whole=True):
            simulated = Simulation(self.job, costs, decision, prices).run(best.simulated.total_s * (1 - SAME))
            if simulated is not None:
                best = ChainFound(decision, simulated, best.candidate)
        return best

    def _tolerance(self) -> float:
        return min(MOST_OPEN, max(SAME, PROOF * (self.effort / self.most_effort - 1)))

    def _solve(self, program: ChainProgram) -> ChainSolution | None:
        self.programs_solved += 1
        self.effort += 1
        return solve_program(program)

    def _better(
        self, best: ChainFound | None, candidate: ChainCandidate, program: ChainProgram, solution: ChainSolution
    ) -> ChainFound | None:
        """The better of the best so far and the candidate's best."""
        costs, prices = self.costs(candidate.assignment, candidate.num_micro_batches), self._prices(candidate)
        for bound, decision in self.rounded(candidate, program, solution):
            below_s = float("inf") if best is None else best.simulated.total_s * (1 - SAME)
            if bound >= below_s:
                continue
            simulation = Simulation(self.job, costs, decision, prices)
            simulated = simulation.run(below_s)
            self.effort += A_SIMULATION + A_TASK * simulation.num_tasks
            if simulated is not None:
                best = ChainFound(decision, simulated, candidate)
        return best

    def _is_due(self, best: ChainFound | None) -> bool:
        """Simulate at once, out of turn: now and then, so that there is a plan to hold bounds against, and to return when time is over."""
        return self.programs_solved & (self.programs_solved - 1) == 0 or (best is None and self.programs_solved % 8 == 0)

    def _key(self, bound: float, candidate: ChainCandidate) -> Key:
        lossy = len(candidate.formats) + (candidate.kv_format != self.domain.base_format)
        rounded = min(bound, float(f"{bound * (1 - TIED):.6g}"))
        return Key(rounded, lossy, self.domain.terms.sizes(candidate.formats).total, self.programs_solved, bound)

    def _costs(self, assignment: int, num_micro_batches: int) -> DeviceCosts:
        terms = self.domain.terms
        share: HostShare = terms.cores.share(terms.assignments[assignment], num_micro_batches)
        return DeviceCosts(self.machine, self.disk, terms.costs.runtime, share)

    def _batch_prices(self, candidate: ChainCandidate) -> BatchPrices:
        costs = self.costs(candidate.assignment, candidate.num_micro_batches)
        return BatchPrices(self.job, costs, candidate.kv_format, candidate.hidden)

    # Whole plans

    def decision(
        self, candidate: ChainCandidate, homes: dict[str, Tier], kv: tuple[tuple[KVUnit, ...], ...], pipeline: Pipeline = ALONE
    ) -> Decision:
        """The decision of a candidate and its placement; what neither reads nor attends needs no threads for it."""
        idle = not any(unit.home == "disk" or unit.host_attends for units in set(kv) for unit in units) and "disk" not in homes.values()
        idle &= not self.domain.terms.shares_cores
        return Decision(
            micro_batch=candidate.micro_batch,
            num_micro_batches=candidate.num_micro_batches,
            formats=dict(candidate.formats),
            homes=homes,
            kv_format=candidate.kv_format,
            kv=kv,
            hidden=candidate.hidden,
            prefetch_depth=candidate.prefetch_depth,
            runtime=self.domain.terms.costs.runtime,
            prefill_products=candidate.products[0],
            decode_products=candidate.products[1],
            threads=self.domain.terms.assignments[0 if idle else candidate.assignment],
            most_threads=self.domain.limits.threads,
            pipeline=pipeline,
        )

    def rounded(self, candidate: ChainCandidate, program: ChainProgram, solution: ChainSolution) -> Iterator[tuple[float, Decision]]:
        """Whole-tensor, whole-unit decisions near the program's optimum, or all of them where they are few, each with seconds that it does
        not go below."""
        everything = self._everything(candidate, program)
        decisions = everything if everything is not None else list(self._near(candidate, solution))
        if not decisions:
            return
        amounts = np.array([self._amounts(decision) for decision in decisions])
        bounds = placed_s(program, amounts[:, 0], amounts[:, 1], amounts[:, 2:])
        for number in np.argsort(bounds, kind="stable"):
            if everything is None or self.memory.fits(decisions[number]):
                yield float(bounds[number]), decisions[number]

    def _everything(self, candidate: ChainCandidate, program: ChainProgram) -> list[Decision] | None:
        """Every placement of whole tensors and units; None where they are too many."""
        choices = program.choices
        tiers: tuple[Tier, ...] = ("device", "host", "disk") if choices.read_bytes_per_s else ("device", "host")
        places = [unit for unit in PLACES if (unit.home != "disk" or choices.disk_kv) and (unit.attends != "host" or candidate.attends)]
        others = self.domain.placer(candidate.formats).others
        found = every_placement(self.model, candidate.num_micro_batches, tiers, places, others)
        if found is None:
            return None
        pipelines = list(self._pipelines(candidate))
        decisions = (self.decision(candidate, homes, kv, pipeline) for homes, kv in found for pipeline in pipelines)
        return [decision for decision in decisions if decision.host_attends == candidate.attends]

    def _pipelines(self, candidate: ChainCandidate) -> Iterator[Pipeline]:
        """Ways to split the layers among the accelerators."""
        yield from (Pipeline(layers, candidate.waves) for layers in splits(self.model.num_layers, self.domain.num_devices))

    def _near(self, candidate: ChainCandidate, solution: ChainSolution) -> Iterator[Decision]:
        for kv in kv_placements(solution.kv, self.model.num_layers, candidate.num_micro_batches):
            for pipeline in self._pipelines(candidate):
                yield from self._placed(candidate, kv, pipeline)

    def _placed(
        self, candidate: ChainCandidate, kv: tuple[tuple[KVUnit, ...], ...], pipeline: Pipeline, *, first_whole: bool = False
    ) -> Iterator[Decision]:
        """Keys and values so placed, and as many weights as fit beside them: of every accelerator on its own memory, and on its share of
        the host's."""
        bare = self.decision(candidate, {}, kv, pipeline)
        beside = self.memory.parts_beside_weights(bare)
        left = {tier: self.memory.capacity[tier] - sum(named.values()) for tier, named in beside.items()}
        if min(left.values()) < 0:
            return
        placers = self.domain.placers(candidate.formats, pipeline)
        total = sum(placer.num_bytes for placer in placers)
        found = []
        for stage, placer in enumerate(placers):
            own = sum(self.memory.stage_beside_weights(bare, stage)["device"].values())
            rooms = self.domain.weight_rooms(candidate, {**left, "device": self.memory.capacity["device"] - own})
            part = rooms.shared(placer.num_bytes / total)
            found.append(list(placer.fill(part, bare.num_buffers, first_whole=first_whole)))
        for number in range(max(map(len, found)) if all(found) else 0):
            homes = {name: tier for one in found for name, tier in one[min(number, len(one) - 1)].items()}
            yield self.decision(candidate, homes, kv, pipeline)

    def _amounts(self, decision: Decision) -> tuple[float, ...]:
        """(bytes of layers and head on the host, on disk, shares of keys and values by place)."""
        size: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        for tensor in self.domain.placed:
            size[decision.homes[tensor.name]] += decision.tensor_bytes(tensor)
        return float(size["host"]), float(size["disk"]), *kv_shares(decision.kv, PLACES)
