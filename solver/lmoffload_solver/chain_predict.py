"""What a decision comes to: simulated seconds of the job, busy seconds of every resource, the plan's timeline."""

from __future__ import annotations

from dataclasses import dataclass

from lmoffload_solver.blocks import Step
from lmoffload_solver.chain_clock import step_ends
from lmoffload_solver.chain_layout import lay_out
from lmoffload_solver.chain_prices import BatchPrices
from lmoffload_solver.chain_schedule import Graph, Server, busiest
from lmoffload_solver.chain_slowing import busy_of
from lmoffload_solver.chain_work import ChainWork
from lmoffload_solver.costs import disk_of
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.host_cores import HostCores
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.simulate import Timed, walk
from lmoffload_solver.value import Resource


@dataclass(frozen=True)
class PhaseSeconds:
    """A phase of the whole job."""

    seconds: float
    busy: dict[Resource, float]
    """Of the resources that every accelerator has, the busiest one's."""
    dequantizing_s: float
    """Of weights, on the device, as a task of its own."""
    quantizing_s: float
    """Of keys and values."""


@dataclass(frozen=True)
class ChainSimulated:
    """The whole job."""

    prefill: PhaseSeconds
    decode: PhaseSeconds
    step_s: float
    """A decode step of the first block, the mean over its steps."""
    num_tasks: int = 0
    """(unit, micro-batch) pairs that were laid out."""

    @property
    def total_s(self) -> float:
        return self.prefill.seconds + self.decode.seconds


def costs_of(machine: MachineProfile, decision: Decision, file_system: str | None = None) -> DeviceCosts:
    """Prices of a machine under a decision's runtime and threads."""
    disk = disk_of(machine, file_system)
    if not decision.threads:
        return DeviceCosts(machine, disk, decision.runtime)
    share = HostCores.of(machine, disk, decision.most_threads).share(decision.threads, decision.num_micro_batches)
    return DeviceCosts(machine, disk, decision.runtime, share)


def simulate_chain(job: Job, costs: DeviceCosts, decision: Decision, prices: BatchPrices | None = None) -> ChainSimulated:
    """Every different block's sampled steps one after another, each step weighted with what it stands for. A step that stands for others
    takes no less than any resource works in it: what was moved ahead before it would be gone after a few of them; nor does any where there
    are several stages, which may begin a step before the one before has ended. `prices` as in `ChainWork`."""
    work = ChainWork(job, costs, decision, prices)
    seconds = [0.0, 0.0]
    busy: tuple[dict[Server, float], dict[Server, float]] = ({}, {})
    widening, packing = [0.0, 0.0], [0.0, 0.0]
    step_s, tasks = 0.0, 0
    for number, block in enumerate(job.blocks(decision.micro_batch, decision.num_micro_batches)):
        steps = work.block(block)
        ends, laid_out = step_ends(steps, decision.runtime, decision.prefetch_depth, costs.waking, decision.pipeline)
        ends, tasks = [0.0, *ends], tasks + laid_out
        for place, (step, units) in enumerate(zip(work.steps, steps, strict=True)):
            weight, phase = step.weight * block.count, int(step.step > 0)
            working = busy_of(units, decision.pipeline)
            elapsed = ends[place + 1] - ends[place]
            whole = step.weight > 1 or decision.pipeline.num_stages > 1
            seconds[phase] += weight * (max(elapsed, *working.values()) if whole else elapsed)
            for server, amount in working.items():
                busy[phase][server] = busy[phase].get(server, 0.0) + weight * amount
            widening[phase] += weight * sum(unit.dequantize for unit in units)
            if decision.kv_format in QUANTIZED:
                packing[phase] += weight * sum(batch.quantize for unit in units for batch in unit.batches)
        if number == 0 and job.gen_len > 1:
            step_s = seconds[1] / (block.count * (job.gen_len - 1))
    phases = [PhaseSeconds(seconds[p], busiest(busy[p]), widening[p], packing[p]) for p in (0, 1)]
    return ChainSimulated(phases[0], phases[1], step_s, tasks)


def busiest_s(job: Job, costs: DeviceCosts, decision: Decision, prices: BatchPrices | None = None) -> float:
    """Seconds that the simulated job does not go below: in every step the busiest server's work."""
    work = ChainWork(job, costs, decision, prices)
    total = 0.0
    for block in job.blocks(decision.micro_batch, decision.num_micro_batches):
        for step, units in zip(work.steps, work.block(block), strict=True):
            total += step.weight * block.count * max(busy_of(units, decision.pipeline).values())
    return total


def chain_timeline(job: Job, costs: DeviceCosts, decision: Decision, *, every_step: bool = False) -> list[Timed]:
    """Begin and end of each task of the first block's sampled steps, or of all."""
    work = ChainWork(job, costs, decision)
    if every_step:
        work.steps = tuple(Step(step, 1.0) for step in range(job.gen_len))
    graph = Graph()
    block = next(job.blocks(decision.micro_batch, decision.num_micro_batches))
    lay_out(work.block(block), decision.runtime, decision.prefetch_depth, graph.emit, decision.pipeline)
    return walk(graph.tasks, lambda task: graph.seconds[task.index])
