"""Other systems' policies on a machine without a device: the host computes, and what it cannot hold comes from the disk.

accelerate: a device map is filled in the model's order, whole layers at a time, until the memory is full; weights are fetched when their
layer is called and dropped after it, so that nothing is read ahead. zero-inference (stage 3, parameters on NVMe): every weight is in the
slow tier, one layer is read ahead. Both compute one batch; its size is the best of a sweep, since both leave it to the user. Plans are
priced with the products of this engine, so that they differ from its own by the policy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lmoffload_solver.assemble import Found, assemble
from lmoffload_solver.candidate import Candidate, Domain
from lmoffload_solver.costs import disk_of
from lmoffload_solver.errors import InfeasibleError, StatedError
from lmoffload_solver.evaluate import Evaluator
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.prices import Prices
from lmoffload_solver.rounding import Placement
from lmoffload_solver.variants import EXACT
from lmoffload_solver.workload import Limits, Workload

READ_AHEAD = {"accelerate": 0, "zero-inference": 1}


def price_on_host(
    policy: str,
    model: ModelShape,
    machine: MachineProfile,
    workload: Workload,
    limits: Limits,
    *,
    file_system: str | None = None,
    digest: str | None = None,
) -> Plan:
    """The plan that a system would choose for a job, which this engine can run.

    Raises:
        InfeasibleError: none of its batches fits.
        StatedError: the system needs a device, or the profile lacks a curve.
    """
    if policy not in READ_AHEAD:
        raise StatedError(f"The policy of {policy} divides work with a device, and {machine.name} has none; name one with --machine.")
    prices = Prices(model, machine, disk_of(machine, file_system), workload, limits)
    evaluator, domain = Evaluator(prices, EXACT), Domain.of(model, machine, workload, limits)
    best: Found | None = None
    for candidate in _candidates(policy, evaluator, domain):
        placement = _placement(policy, evaluator, candidate)
        if placement is None:
            continue
        simulated = evaluator.simulate(candidate, placement)
        if best is None or simulated.total_s < best.simulated.total_s:
            best = Found(candidate, placement, simulated, simulated.total_s)
    if best is None:
        raise InfeasibleError(f"The policy of {policy} fits no batch of this work on {machine.name}; give it more --host-memory.")
    plan = assemble(evaluator, replace(best, programs_solved=0), digest or model.fingerprint(), None, (), cut_short=False)
    return plan.model_copy(update={"policy": policy, "shadow_prices": (), "refill": None})


def _candidates(policy: str, evaluator: Evaluator, domain: Domain) -> Iterator[Candidate]:
    for threads in domain.threads:
        for kernel in evaluator.prices.costs(threads).linear.kernels(evaluator.model.head.format):
            for size in dict.fromkeys(size for size, _ in domain.micro_batches):
                yield Candidate(size, 1, threads, kernel, kernel, READ_AHEAD[policy])


def _placement(policy: str, evaluator: Evaluator, candidate: Candidate) -> Placement | None:
    """Whole layers at home in the model's order while they fit (none for zero-inference), the head last; None where nothing fits."""
    rounding, depth = evaluator.roundings["layer"], candidate.prefetch_depth
    kept = range(rounding.model.num_layers + 2) if policy == "accelerate" else range(1)
    best = None
    for at_home in kept:
        layers = [ladder.levels[0 if layer + 1 < at_home else -1] for layer, ladder in enumerate(rounding.ladders)]
        head_at_home = at_home == rounding.model.num_layers + 1
        embedding_at_home = head_at_home if rounding.model.tied_head else at_home > 0
        placement = rounding.placed(layers, depth, head_at_home, embedding_at_home)
        if placement.memory_bytes <= evaluator.room(candidate, head_at_home):
            best = placement
    return best
