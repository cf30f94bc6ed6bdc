"""The discrete choices around the program: kernel per phase, micro-batch, number of micro-batches, compute threads, prefetch depth.

The domain is finite and stated by `Domain`. Closed-form bounds are taken of all of it; the sets of a layer's matrices tighten them, or
where these tell nothing the linear program those of the most promising; candidates are rounded to whole tensors and simulated in order of
their bound, until the next bound is no better than the best simulated plan. Where the sets of whole matrices are few, all are tried, and
that plan is then the best of all for the simulated time; elsewhere rounding is a rule that tries some, and what is left unproven, down to
the lowest bound, is the plan's gap.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from lmoffload_solver.assemble import Found, assemble
from lmoffload_solver.bounds import Bounds
from lmoffload_solver.candidate import MOST_PREFETCH, Candidate, Domain
from lmoffload_solver.costs import disk_of
from lmoffload_solver.errors import StatedError
from lmoffload_solver.evaluate import Evaluator
from lmoffload_solver.loss import LossTable
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import Infeasible, Optimal, Outcome, TimedOut, plan_in, with_plan
from lmoffload_solver.plan import LooserQuality
from lmoffload_solver.prices import Prices
from lmoffload_solver.program import Program
from lmoffload_solver.shortage import infeasible
from lmoffload_solver.value import Quality
from lmoffload_solver.variants import Offered, offered
from lmoffload_solver.workload import Limits, Workload

__all__ = ["Infeasible", "Optimal", "Outcome", "TimedOut", "solve"]

MOST_PROGRAMS = 24
"""Candidates whose bound the linear program tightens before they are simulated; for the many after them simulating at once is cheaper.
Those of which mixes of sets are known need none."""

MOST_PROOFS = 48
"""Candidates whose bound it tightens afterwards, to tell how near the plan is to the best."""

NEAR = 0.005
"""A gap that is not made smaller."""

LOOSER: Mapping[Quality, tuple[Quality, ...]] = MappingProxyType({"exact": ("int8", "int4"), "int8": ("int4",), "int4": (), "any": ()})
"""Classes worth telling of."""

PATIENCE = 150
"""Where rounding tries some placements, so many candidates that come no nearer to the lowest bound are enough."""

SAME = 1e-9
"""Relative difference of two times that is rounding of floating point."""


def solve(
    model: ModelShape,
    machine: MachineProfile,
    workload: Workload,
    limits: Limits,
    *,
    file_system: str | None = None,
    model_fingerprint: str | None = None,
    losses: LossTable | None = None,
) -> Outcome:
    """The best plan for a job.

    Args:
        model: what the model is.
        machine: what the machine is; its limits are those that hold now.
        workload: what is to be done.
        limits: what the user grants and fixes; `limits.solve_s` is the time limit of the search.
        file_system: mount point of the disk that holds the checkpoint; the profile's first disk unless given.
        model_fingerprint: digest of the checkpoint, kept in the plan; the shape's own unless given.
        losses: what formats cost this model in quality, as measured; None: nothing is known.

    Raises:
        StatedError: the machine profile lacks a disk or a curve that the plan needs, or the goal deadline has none.
    """
    if workload.goal == "deadline":
        return _by_deadline(model, machine, workload, limits, file_system, model_fingerprint, losses)
    digest = model_fingerprint or model.fingerprint()
    if workload.goal == "latency":
        # Another sequence in a block never makes the first one finish sooner, so one alone is the quickest.
        limits = limits.model_copy(update={"micro_batch": limits.micro_batch or 1, "num_micro_batches": limits.num_micro_batches or 1})
    if machine.accelerator is not None:
        from lmoffload_solver.chain_solve import solve_chain

        return solve_chain(model, machine, workload, limits, file_system, digest, losses)
    begin = time.perf_counter()
    prices = Prices(model, machine, disk_of(machine, file_system), workload, limits)
    domain = Domain.of(model, machine, workload, limits)
    search = Search(prices, domain, offered(model, machine, domain.threads, workload.quality, losses), begin + limits.solve_s)
    best = search.run()
    if best is None and not search.cut_short:
        return infeasible(search.evaluator(search.offered.narrowest), domain)
    tokens = workload.num_prompts * workload.gen_len
    if best is None:
        return TimedOut(None, tokens / search.bound_s)
    looser = tuple(_looser(prices, best.candidate, quality, losses, begin + limits.solve_s) for quality in LOOSER[workload.quality])
    bound_s = min(search.bound_s, best.simulated.total_s)
    found = replace(best, bound_s=bound_s, solve_s=time.perf_counter() - begin, programs_solved=search.programs_solved + 1)
    evaluator = search.evaluator(best.candidate.variant)
    plan = assemble(evaluator, found, digest, losses, tuple(other for other in looser if other is not None), cut_short=search.cut_short)
    if search.cut_short:
        return TimedOut(plan, plan.bound_tokens_per_s)
    return Optimal(plan, plan.bound_tokens_per_s, plan.gap)


def _looser(prices: Prices, candidate: Candidate, quality: Quality, losses: LossTable | None, until: float) -> LooserQuality | None:
    """What a looser class gives at least: with the plan's own batch and threads. None where the machine's profile knows none of it."""
    threads = (candidate.threads,)
    choices = offered(prices.model, prices.machine, threads, quality, losses)
    pairs, chunks = ((candidate.micro_batch, candidate.num_micro_batches),), tuple(dict.fromkeys((None, candidate.prefill_chunk)))
    on_disk = tuple(sorted({0, candidate.kv_on_disk}))
    domain = Domain(pairs, threads, tuple(range(MOST_PREFETCH + 1)), prefill_chunks=chunks, kv_on_disk=on_disk)
    found = Search(prices, domain, choices, until).run()
    if found is None or not found.candidate.variant.lossy_parts:
        return None
    tokens = prices.workload.num_prompts * prices.workload.gen_len
    loss = found.candidate.variant.loss(losses, found.candidate.kernels)
    return LooserQuality(quality=quality, tokens_per_s=tokens / found.simulated.total_s, loss=loss)


def _by_deadline(
    model: ModelShape,
    machine: MachineProfile,
    workload: Workload,
    limits: Limits,
    file_system: str | None,
    fingerprint: str | None,
    losses: LossTable | None,
) -> Outcome:
    """The best plan of the best quality class that is done in time.

    Raises:
        StatedError: no deadline is given.
    """
    if workload.deadline_s is None:
        raise StatedError("The goal deadline needs a time to be done by; give --deadline.")
    classes: tuple[Quality, ...] = ("exact", "int8", "int4", "any")
    tried: list[Outcome] = []
    for quality in classes:
        asked = workload.model_copy(update={"quality": quality, "goal": "throughput"})
        outcome = solve(model, machine, asked, limits, file_system=file_system, model_fingerprint=fingerprint, losses=losses)
        plan = plan_in(outcome)
        if plan is not None and plan.predicted.total_s <= workload.deadline_s:
            kept = asked.model_copy(update={"goal": "deadline"})
            return with_plan(outcome, plan.model_copy(update={"goal": "deadline", "workload": kept}))
        tried.append(outcome)
    known = [plan for plan in map(plan_in, tried) if plan is not None]
    if not known:
        return tried[-1]
    quickest = min(known, key=lambda plan: plan.predicted.total_s)
    late = quickest.predicted.total_s - workload.deadline_s
    needs = f"The quickest plan (quality {quickest.quality}) needs {quickest.predicted.total_s:.1f} s, {late:.1f} s more than there are"
    return Infeasible("time", 0, f"{needs}; allow more time, or give fewer prompts or a smaller --gen-len.")


class Search:
    """Best first over the domain."""

    def __init__(self, prices: Prices, domain: Domain, choices: Offered, deadline: float) -> None:
        self.prices, self.domain, self.offered, self.deadline = prices, domain, choices, deadline
        self.evaluator = cache(lambda variant: Evaluator(prices, variant))
        self.programs_solved = 0
        self.cut_short = False
        self.bound_s = float("inf")
        """Seconds that nothing in the domain goes below."""
        self._unproven: list[tuple[float, int, Candidate, bool]] = []
        """(bound, number, candidate, whether the program gave it) of those of which not all placements were tried."""

    def run(self) -> Found | None:
        """The best plan found; None where nothing fits or the time is over before anything was simulated."""
        heap = [(self._order(bound, candidate), number, bound, candidate, False) for number, (bound, candidate) in enumerate(self.bounds())]
        heapq.heapify(heap)
        best: Found | None = None
        idle = 0
        while heap:
            _, number, bound, candidate, tight = heapq.heappop(heap)
            if best is not None and bound >= best.simulated.total_s * (1 - SAME):
                continue  # of bounds taken for equal, a later one may be lower by a trifle
            self.cut_short = time.perf_counter() > self.deadline
            if self.cut_short or idle > PATIENCE:
                self._unproven.append((bound, number, candidate, tight))
                break
            if not tight and (self._has_mixes(candidate) or self.programs_solved < MOST_PROGRAMS):
                bound = max(bound, self.tightened(candidate))
                if bound < float("inf"):
                    heapq.heappush(heap, (self._order(bound, candidate), number, bound, candidate, True))
                continue
            before, best = best, self._simulated(candidate, bound, best)
            if not self.evaluator(candidate.variant).has_all(candidate):
                self._unproven.append((bound, number, candidate, tight))
                idle = idle + 1 if best is before else 0
        self.bound_s = self._proven(best.simulated.total_s if best is not None else float("inf"))
        return best

    def _proven(self, best_s: float) -> float:
        """Seconds that nothing goes below: the lowest of what was left open, tightened while that is worth it."""
        heapq.heapify(self._unproven)
        before = self.programs_solved
        while self._unproven and self._unproven[0][0] < best_s:
            bound, number, candidate, tight = self._unproven[0]
            enough = bound >= best_s * (1 - NEAR) or self.programs_solved - before >= MOST_PROOFS
            if tight or enough or time.perf_counter() > self.deadline:
                return bound
            heapq.heapreplace(self._unproven, (max(bound, self.tightened(candidate)), number, candidate, True))
        return best_s

    def _simulated(self, candidate: Candidate, bound: float, best: Found | None) -> Found | None:
        """The best so far, or what is better of this candidate."""
        evaluator = self.evaluator(candidate.variant)
        for least, placement in evaluator.bounded_placements(candidate):
            if best is not None and least >= best.simulated.total_s * (1 - SAME):
                break
            simulated = evaluator.simulate(candidate, placement)
            if best is None or simulated.total_s < best.simulated.total_s * (1 - SAME):
                best = Found(candidate, placement, simulated, bound)
        return best

    def bounds(self) -> Bounds:
        """Closed-form bound of every candidate that may fit."""
        return Bounds(self.prices, self.domain, self.offered)

    def tightened(self, candidate: Candidate) -> float:
        """Bound by the sets of a layer's matrices, or else by the program with whole matrices; infinite: nothing fits."""
        evaluator = self.evaluator(candidate.variant)
        if self._has_mixes(candidate):
            return min((mix.bound_s for mix in evaluator.mixes(candidate)), default=float("inf"))
        self.programs_solved += 1
        solved = Program(evaluator.program_choices(candidate), whole=True).bound_s()
        return float("inf") if solved is None else solved

    def _has_mixes(self, candidate: Candidate) -> bool:
        return self.evaluator(candidate.variant).has_mixes(candidate)

    @staticmethod
    def _order(bound: float, candidate: Candidate) -> tuple[float, int]:
        """Lowest bound first; of bounds taken for equal the one that loses least."""
        return float(f"{bound:.6g}"), candidate.variant.lossy_parts
