"""Solving for a machine with a device: the search's result as an outcome, with prices and what a looser quality would give."""

from __future__ import annotations

import time

from lmoffload_solver.chain_plan import Remarks, plan_of
from lmoffload_solver.chain_program import GB, ChainChoices, ChainProgram, ChainSolution
from lmoffload_solver.chain_search import ChainCandidate, ChainFound, ChainSearch
from lmoffload_solver.costs import disk_of
from lmoffload_solver.decision import Job
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import Infeasible, Optimal, Outcome, TimedOut
from lmoffload_solver.plan import LooserQuality, ShadowPrice
from lmoffload_solver.value import Quality, Tier
from lmoffload_solver.workload import Limits, Workload

GIB = 2**30
LOOSER: dict[Quality, tuple[Quality, ...]] = {"exact": ("int8", "int4"), "int8": ("int4",), "int4": (), "any": ()}
"""Classes worth telling of. "any" differs from "int4" only in larger groups."""

LOOSER_PROOF = 0.02
"""How near to the best a looser class's figure must be proven; its batch is the plan's, so that it is what the class gives at least."""


def solve_chain(
    model: ModelShape, machine: MachineProfile, workload: Workload, limits: Limits, file_system: str | None, digest: str
) -> Outcome:
    """The best plan for a job on a machine with a device.

    Raises:
        StatedError: the profile lacks a disk or a rate.
    """
    if limits.weights_memory_bytes is not None or limits.weights_memory_share is not None:
        raise StatedError("A limit on the memory of weights is not planned for on a machine with a device; limit --device-memory instead.")
    begin = time.perf_counter()
    job, disk = Job(model, workload), disk_of(machine, file_system)
    search = ChainSearch(job, machine, disk, limits, workload.quality, begin + limits.solve_s)
    found = search.run()
    if found is None:
        return TimedOut(None, job.tokens / search.bound_s) if search.cut_short else shortage(search)
    bound_s = min(search.bound_s, found.simulated.total_s)
    looser = []
    batch = {"micro_batch": found.candidate.micro_batch, "num_micro_batches": found.candidate.num_micro_batches}
    same_batch, until = limits.model_copy(update=batch), begin + limits.solve_s
    for quality in LOOSER[workload.quality]:
        other = ChainSearch(job, machine, disk, same_batch, quality, until, proof=LOOSER_PROOF).run()
        if other is not None:
            looser.append(LooserQuality(quality=quality, tokens_per_s=job.tokens / other.simulated.total_s, loss=None))
    remarks = Remarks(
        bound_s=bound_s,
        cut_short=search.cut_short,
        solve_s=time.perf_counter() - begin,
        programs_solved=search.programs_solved + 1,
        shadow_prices=shadow_prices(search, found),
        looser_quality=tuple(looser),
    )
    plan = plan_of(
        job, machine, found.decision, digest=digest, limits=limits, simulated=found.simulated, remarks=remarks, file_system=file_system
    )
    return TimedOut(plan, plan.bound_tokens_per_s) if search.cut_short else Optimal(plan, plan.bound_tokens_per_s, plan.gap)


def shadow_prices(search: ChainSearch, found: ChainFound) -> tuple[ShadowPrice, ...]:
    """Duals as gains: d(tokens/s) = −tokens/T² · dT, for a GiB more of a memory and a GB/s more of the link and of the disk."""
    choices = search.choices(found.candidate)
    solution = ChainProgram(choices).solve()
    if solution is None:
        return ()
    gain = search.job.tokens / solution.total_s**2
    prices = [
        ShadowPrice(resource=f"{tier}_memory", unit="GiB", gain_tokens_per_s=gain * seconds * GIB)
        for tier, seconds in memory_prices(solution).items()
    ]
    for resource, rate, seconds in (
        ("upload", choices.upload_bytes_per_s, waiting_s(choices, solution, "upload")),
        ("disk_read", choices.read_bytes_per_s, waiting_s(choices, solution, "disk_read")),
    ):
        prices.append(ShadowPrice(resource=resource, unit="GB/s", gain_tokens_per_s=gain * seconds / rate * GB))
    return tuple(prices)


def memory_prices(solution: ChainSolution) -> dict[Tier, float]:
    """Seconds that one more byte of device and of host memory saves."""
    tiers: tuple[Tier, ...] = ("device", "host")
    return {tier: max(0.0, -solution.duals[f"capacity.{tier}"]) / GB for tier in tiers}


def waiting_s(choices: ChainChoices, solution: ChainSolution, resource: str) -> float:
    """Seconds of the job that scale with the slowness of a resource: −dT / d ln(rate), each row's dual times what of it scales."""
    return ChainProgram(choices).scaling_s(solution, resource)


def shortage(search: ChainSearch) -> Infeasible:
    """Which memory the plan that needs least lacks, by how much, and what would help."""
    widest = search.weight_formats()[-1]
    least = min(search.pairs(), key=lambda pair: pair[0] * pair[1])
    kv_format = search.kv_formats()[-1]
    candidate = ChainCandidate(*least, widest, kv_format, "host", 0)
    rooms = search.rooms(candidate)
    sizes = search.sizes(widest)
    kv_bytes = search.memory.kv_token_bytes(kv_format) * min(least[0] * least[1], search.job.num_prompts)
    layer = sizes.in_layers / search.model.num_layers
    short: dict[Tier, float] = {"device": layer - rooms["device"], "host": -rooms["host"]}
    total = sum(sizes.classes.values()) + kv_bytes - max(0.0, rooms["device"]) - max(0.0, rooms["host"]) - rooms["disk"]
    resource: Tier = "disk"
    if short["device"] > 0 or short["host"] > 0:
        resource = "device" if short["device"] >= short["host"] else "host"
        lacking = short[resource]
    else:
        lacking = total
    lack = max(1, round(lacking))
    option = {"device": "--device-memory", "host": "--host-memory", "disk": "--disk-space"}[resource]
    needed = round(search.memory.capacity[resource]) + lack
    name = f"{resource} memory" if resource != "disk" else "disk space"
    cause = "shorter prompts would help too" if resource == "device" else "a looser --quality would help too"
    return Infeasible(name, lack, f"Give the plan at least {needed} bytes of {name} ({option} {-(-needed // 2**20)}MiB); {cause}.")
