"""The discrete choices around the program: kernel per phase, micro-batch, number of micro-batches, compute threads, prefetch depth.

The domain is finite and stated by `Domain`. Closed-form bounds are taken of all of it; the linear program tightens those of the most
promising; candidates are rounded to whole tensors and simulated in order of their bound, until the next bound is no better than the best
simulated plan.
That plan is then optimal for the simulated time over the domain: a bound prunes, never a guess.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lmoffload_solver.assemble import Found, assemble
from lmoffload_solver.costs import disk_of
from lmoffload_solver.errors import StatedError
from lmoffload_solver.evaluate import Candidate, Evaluator
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import Infeasible, Optimal, Outcome, TimedOut, plan_in, with_plan
from lmoffload_solver.program import Program
from lmoffload_solver.rounding import Stream
from lmoffload_solver.shortage import infeasible
from lmoffload_solver.threads import compute_choices
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits, Workload

__all__ = ["Infeasible", "Optimal", "Outcome", "TimedOut", "solve"]

MOST_PREFETCH = 4
MOST_MICRO_BATCHES = 64
MOST_PROGRAMS = 24
"""Candidates whose bound the linear program tightens; for the many after them simulating at once is cheaper."""

SAME = 1e-9
"""Relative difference of two times that is rounding of floating point."""


@dataclass(frozen=True)
class Domain:
    """What the search chooses from.

    Micro-batch: 2^i, 3·2^i, and the job cut into 1 to 4 equal parts. Number of micro-batches: 2^i, 3·2^i up to 64, and the job cut into 1
    to 4 equal blocks. Prefetch depth 0 to 4. Layers streamed whole or matrix by matrix. Every measured number of compute threads. Per
    phase every measured kernel of the model's main format. Limits fix a choice. A block larger than the job is the job.
    """

    micro_batches: tuple[tuple[int, int], ...]
    """(micro-batch, number of micro-batches)."""
    threads: tuple[int, ...]
    depths: tuple[int, ...]
    streams: tuple[Stream, ...] = ("layer", "matrix")

    @staticmethod
    def of(model: ModelShape, machine: MachineProfile, workload: Workload, limits: Limits) -> Domain:
        """The domain of a job.

        Raises:
            StatedError: the profile has no curve for a stored format of the model.
        """
        cores = machine.host.cores if limits.threads is None else min(limits.threads, machine.host.cores)
        formats = frozenset(t.format for t in model.tensors if t.is_matrix)
        num = workload.num_prompts
        sizes = _sizes(num, num) if limits.micro_batch is None else (min(limits.micro_batch, num),)
        pairs: list[tuple[int, int]] = []
        for size in sizes:
            most = -(-num // size)
            fixed = limits.num_micro_batches
            counts = _sizes(most, MOST_MICRO_BATCHES) if fixed is None else (min(fixed, most),)
            pairs.extend((size, count) for count in counts)
        return Domain(tuple(pairs), compute_choices(machine, formats, cores), tuple(range(MOST_PREFETCH + 1)))


def solve(
    model: ModelShape,
    machine: MachineProfile,
    workload: Workload,
    limits: Limits,
    *,
    file_system: str | None = None,
    model_fingerprint: str | None = None,
) -> Outcome:
    """The best plan for a job.

    Args:
        model: what the model is.
        machine: what the machine is; its limits are those that hold now.
        workload: what is to be done.
        limits: what the user grants and fixes; `limits.solve_s` is the time limit of the search.
        file_system: mount point of the disk that holds the checkpoint; the profile's first disk unless given.
        model_fingerprint: digest of the checkpoint, kept in the plan; the shape's own unless given.

    Raises:
        StatedError: the machine profile lacks a disk or a curve that the plan needs, or the goal deadline has none.
    """
    if workload.goal == "deadline":
        return _by_deadline(model, machine, workload, limits, file_system, model_fingerprint)
    digest = model_fingerprint or model.fingerprint()
    if workload.goal == "latency":
        # Another sequence in a block never makes the first one finish sooner, so one alone is the quickest.
        limits = limits.model_copy(update={"micro_batch": limits.micro_batch or 1, "num_micro_batches": limits.num_micro_batches or 1})
    if machine.accelerator is not None:
        from lmoffload_solver.chain_solve import solve_chain

        return solve_chain(model, machine, workload, limits, file_system, digest)
    begin = time.perf_counter()
    disk = disk_of(machine, file_system)
    domain = Domain.of(model, machine, workload, limits)
    evaluator = Evaluator(model, machine, disk, workload, limits)
    search = Search(evaluator, domain, begin + limits.solve_s)
    best = search.run()
    if best is None and not search.cut_short:
        return infeasible(evaluator, domain.micro_batches, domain.threads)
    tokens = workload.num_prompts * workload.gen_len
    if best is None:
        return TimedOut(None, tokens / search.bound_s)
    bound_s = min(search.bound_s, best.simulated.total_s) if search.cut_short else best.simulated.total_s
    found = replace(best, bound_s=bound_s, solve_s=time.perf_counter() - begin, programs_solved=search.programs_solved + 1)
    plan = assemble(evaluator, found, digest, cut_short=search.cut_short)
    if search.cut_short:
        return TimedOut(plan, plan.bound_tokens_per_s)
    return Optimal(plan, plan.bound_tokens_per_s, plan.gap)


def _by_deadline(
    model: ModelShape, machine: MachineProfile, workload: Workload, limits: Limits, file_system: str | None, fingerprint: str | None
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
        outcome = solve(model, machine, asked, limits, file_system=file_system, model_fingerprint=fingerprint)
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

    def __init__(self, evaluator: Evaluator, domain: Domain, deadline: float) -> None:
        self.evaluator, self.domain, self.deadline = evaluator, domain, deadline
        self.programs_solved = 0
        self.cut_short = False
        self.bound_s = float("inf")
        """Seconds that nothing left in the domain goes below."""

    def run(self) -> Found | None:
        """The best plan found; None where nothing fits or the time is over before anything was simulated."""
        heap = [(bound, number, candidate, False) for number, (bound, candidate) in enumerate(self.bounds())]
        heapq.heapify(heap)
        best: Found | None = None
        while heap:
            bound, number, candidate, tight = heapq.heappop(heap)
            self.bound_s = bound
            if best is not None and bound >= best.simulated.total_s * (1 - SAME):
                break
            if time.perf_counter() > self.deadline:
                self.cut_short = True
                return best
            if not tight and self.programs_solved < MOST_PROGRAMS:
                tighter = self.tightened(candidate)
                if tighter is not None:
                    heapq.heappush(heap, (max(bound, tighter), number, candidate, True))
                continue
            for least, placement in self.evaluator.bounded_placements(candidate):
                if best is not None and least >= best.simulated.total_s * (1 - SAME):
                    break
                simulated = self.evaluator.simulate(candidate, placement)
                if best is None or simulated.total_s < best.simulated.total_s * (1 - SAME):
                    best = Found(candidate, placement, simulated, bound)
        else:
            self.bound_s = best.simulated.total_s if best is not None else float("inf")
        return best

    def bounds(self) -> Iterator[tuple[float, Candidate]]:
        """Closed-form bound of every candidate that may fit."""
        depths = np.array(self.domain.depths, dtype=np.float64)
        for threads in self.domain.threads:
            for size, count in self.domain.micro_batches:
                if not self.evaluator.may_fit(size, count, threads):
                    continue
                decodes = self.evaluator.kernels(size, count, threads, "decode")
                prefills = self.evaluator.kernels(size, count, threads, "prefill")
                for prefill, decode, stream in product(prefills, decodes, self.domain.streams):
                    candidate = Candidate(size, count, threads, prefill, decode, 0, stream)
                    if stream == "layer" or not self.evaluator.all_fits(candidate):
                        for depth, bound in zip(self.domain.depths, self.evaluator.bound_s(candidate, depths), strict=True):
                            if np.isfinite(bound):
                                yield float(bound), replace(candidate, prefetch_depth=depth)

    def tightened(self, candidate: Candidate) -> float | None:
        """Bound by the linear program; None where it is infeasible."""
        self.programs_solved += 1
        solution = Program(self.evaluator.program_choices(candidate)).solve()
        return None if solution is None else solution.total_s


def _sizes(total: int, most: int) -> tuple[int, ...]:
    """2^i and 3·2^i up to `total` and `most`, and `total` cut into 1 to 4 equal parts, ascending."""
    grid = {factor << i for factor in (1, 3) for i in range(total.bit_length())}
    grid |= {-(-total // parts) for parts in range(1, 5)}
    return tuple(sorted(size for size in grid if size <= min(total, most)))
