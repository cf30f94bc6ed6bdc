"""Solving for a machine with a device: the search's result as an outcome, with prices and what a looser quality would give."""

from __future__ import annotations

import time

import numpy as np

from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.chain_domain import ChainCandidate
from lmoffload_solver.chain_plan import Remarks, plan_of
from lmoffload_solver.chain_program import GB, ChainProgram
from lmoffload_solver.chain_search import ChainFound, ChainSearch
from lmoffload_solver.chain_solver import memory_prices, scaling_s, solve_program
from lmoffload_solver.costs import disk_of
from lmoffload_solver.decision import Job
from lmoffload_solver.errors import StatedError
from lmoffload_solver.loss import LossTable
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.outcome import Infeasible, Optimal, Outcome, TimedOut
from lmoffload_solver.plan import LooserQuality, ShadowPrice
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits, Workload

GIB = 2**30
LOOSER: dict[Quality, tuple[Quality, ...]] = {"exact": ("int8", "int4"), "int8": ("int4",), "int4": (), "any": ()}
"""Classes worth telling of. "any" differs from "int4" only in larger groups."""

LOOSER_EFFORT = 10.0
"""Effort for a looser class's figure; its batch is the plan's, so that it is what the class gives at least."""


def solve_chain(
    model: ModelShape,
    machine: MachineProfile,
    workload: Workload,
    limits: Limits,
    file_system: str | None,
    digest: str,
    losses: LossTable | None = None,
) -> Outcome:
    """The best plan for a job on a machine with a device.

    Raises:
        StatedError: the profile lacks a disk or a rate, or there are more devices than layers.
    """
    begin = time.perf_counter()
    if machine.accelerator is not None and machine.accelerator.count > model.num_layers:
        raise StatedError(f"{model.name} has {model.num_layers} layers for {machine.accelerator.count} devices: name no more devices.")
    job, disk = Job(model, workload), disk_of(machine, file_system)
    search = ChainSearch(job, machine, disk, limits, workload.quality, begin + limits.solve_s, losses=losses)
    found = search.run()
    if found is None:
        return TimedOut(None, job.tokens / search.bound_s) if search.cut_short else shortage(search)
    bound_s = min(search.bound_s, found.simulated.total_s)
    looser = []
    batch = {"micro_batch": found.candidate.micro_batch, "num_micro_batches": found.candidate.num_micro_batches}
    same_batch, until = limits.model_copy(update=batch), begin + limits.solve_s
    for quality in LOOSER[workload.quality]:
        widened = ChainSearch(job, machine, disk, same_batch, quality, until, effort=LOOSER_EFFORT, losses=losses)
        other = widened.run()
        if other is not None:
            rate, loss = job.tokens / other.simulated.total_s, widened.domain.loss(other.candidate)
            looser.append(LooserQuality(quality=quality, tokens_per_s=rate, loss=loss))
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
    plan = plan.model_copy(update={"loss": search.domain.loss(found.candidate)})
    return TimedOut(plan, plan.bound_tokens_per_s) if search.cut_short else Optimal(plan, plan.bound_tokens_per_s, plan.gap)


def shadow_prices(search: ChainSearch, found: ChainFound) -> tuple[ShadowPrice, ...]:
    """Duals as gains: d(tokens/s) = −tokens/T² · dT, for a GiB more of a memory and a GB/s more of the link and of the disk."""
    choices = search.domain.choices(found.candidate)
    program = ChainProgram(choices)
    solution = solve_program(program)
    if solution is None:
        return ()
    gain = search.job.tokens / solution.total_s**2
    prices = [
        ShadowPrice(resource=f"{tier}_memory", unit="GiB", gain_tokens_per_s=gain * seconds * GIB)
        for tier, seconds in memory_prices(solution).items()
    ]
    for resource, rate, seconds in (
        ("upload", search.domain.terms.upload_rate, scaling_s(program, solution, "upload")),
        ("disk_read", choices.waves * choices.read_bytes_per_s, scaling_s(program, solution, "disk_read")),
    ):
        prices.append(ShadowPrice(resource=resource, unit="GB/s", gain_tokens_per_s=gain * seconds / rate * GB if rate else 0.0))
    return tuple(prices)


def shortage(search: ChainSearch) -> Infeasible:
    """Which memory the plan that needs least lacks, by how much, and what would help."""
    domain = search.domain
    memory = domain.memory
    size, count = min(domain.pairs, key=lambda pair: pair[0] * pair[1])
    kv_format = domain.kv_formats[-1]
    formats = min(domain.formats, key=lambda one: domain.terms.sizes(one).total)
    candidate = ChainCandidate(size, count, formats, kv_format, "host", ("dequantizing", "dequantizing"), 0)
    rooms, sizes = domain.rooms(candidate), domain.terms.sizes(formats)
    needed = sizes.total + domain.kv_bytes(candidate)
    order = domain.placer(formats).orders[0]
    on_device = min(float(max(order.largest_rest)), needed)
    # As much at home on the device as leaves room for a buffer there: what then comes from the disk passes through one on the host.
    at_home = order.first_bytes + order.largest_rest <= rooms["device"] / domain.num_devices
    staged = float(order.largest_rest[np.flatnonzero(at_home)[-1]]) if at_home.any() else on_device
    away = max(0.0, needed - max(0.0, rooms["device"]))
    lacks: dict[str, float] = {
        "device memory": on_device - rooms["device"] / domain.num_devices,
        "host memory": (min(staged, away) if away - max(0.0, rooms["host"]) <= rooms["disk"] else 0.0) - rooms["host"],
        "weights memory": on_device - domain.weights_room(candidate),
    }
    resource = max(lacks, key=lambda name: lacks[name])
    if lacks[resource] <= 0:
        resource = "disk space"
        lacks[resource] = away - max(0.0, rooms["host"]) - rooms["disk"]
    lack = max(1, round(lacks[resource]))
    device = search.machine.accelerator
    emulating, rate = "--device-memory", ""
    if isinstance(device, EmulatedDevice) and resource == "device memory" and domain.limits.device_memory_bytes is None:
        emulating, rate = "--emulate-device", f"@{device.bytes_per_s / 1e6:g}MB/s"
    options: dict[str, tuple[str, float]] = {
        "device memory": (emulating, memory.capacity["device"]),
        "host memory": ("--host-memory", memory.capacity["host"]),
        "disk space": ("--disk-space", memory.capacity["disk"]),
        "weights memory": ("--weights-memory", memory.weights_capacity),
    }
    option, granted = options[resource]
    enough = round(granted) + lack
    cause = "shorter prompts would help too" if resource == "device memory" else "a looser --quality would help too"
    enough_told = f"{option} {-(-enough // 2**20)}MiB{rate}"
    return Infeasible(resource, lack, f"Give the plan at least {enough} bytes of {resource} ({enough_told}); {cause}.")
