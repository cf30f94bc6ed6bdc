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
    """A whole simulation. `prices` as in `ChainWork`."""
    simulated = Simulation(job, costs, decision, prices).run()
    assert simulated is not None, "nothing is above no limit"
    return simulated


class Simulation:
    """Every different block's sampled steps one after another, each step weighted with what it stands for. A step that stands for others
    takes no less than any resource works in it: what was moved ahead before it would be gone after a few of them; nor does any where there
    are several stages, which may begin a step before the one before has ended. `prices` as in `ChainWork`."""

    def __init__(self, job: Job, costs: DeviceCosts, decision: Decision, prices: BatchPrices | None = None) -> None:
        self.costs, self.decision = costs, decision
        self.work = ChainWork(job, costs, decision, prices)
        self.blocks = [(block, self.work.block(block)) for block in job.blocks(decision.micro_batch, decision.num_micro_batches)]
        self.gen_len = job.gen_len
        self.num_tasks = 0
        """(unit, micro-batch) pairs that were laid out."""

    def run(self, below_s: float = float("inf")) -> ChainSimulated | None:
        """What the job comes to; None, found as early as may be, where it takes no less than `below_s`."""
        pipeline = self.decision.pipeline
        working = [[busy_of(units, pipeline) for units in steps] for _, steps in self.blocks]
        least = [[self._least_s(*of_step) for of_step in zip(self.work.steps, busy, strict=True)] for busy in working]
        left = sum(block.count * sum(of_block) for (block, _), of_block in zip(self.blocks, least, strict=True))
        seconds = [0.0, 0.0]
        step_s = 0.0
        if left >= below_s:
            return None
        for number, (block, units) in enumerate(self.blocks):
            before = 0.0
            ends = step_ends(units, self.decision.runtime, self.decision.prefetch_depth, self.costs.waking, pipeline)
            for place, (step, (end, laid_out)) in enumerate(zip(self.work.steps, ends, strict=True)):
                elapsed, before = end - before, end
                self.num_tasks += laid_out
                weight = step.weight * block.count
                seconds[int(step.step > 0)] += weight * (max(elapsed, *working[number][place].values()) if self._whole(step) else elapsed)
                left -= block.count * least[number][place]
                if sum(seconds) + left >= below_s:
                    return None
            if number == 0 and self.gen_len > 1:
                step_s = seconds[1] / (block.count * (self.gen_len - 1))
        prefill, decode = (self._phase(number, seconds[number], working) for number in (0, 1))
        return ChainSimulated(prefill, decode, step_s)

    def _whole(self, step: Step) -> bool:
        """Whether a step takes no less than any server works in it."""
        return step.weight > 1 or self.decision.pipeline.num_stages > 1

    def _least_s(self, step: Step, working: dict[Server, float]) -> float:
        """A sampled step takes no less; one that stands for itself alone may find anything moved ahead, but what the device computes."""
        return step.weight * (max(working.values()) if self._whole(step) else working.get(("device", 0), 0.0))

    def _phase(self, phase: int, seconds: float, working: list[list[dict[Server, float]]]) -> PhaseSeconds:
        busy: dict[Server, float] = {}
        widening = packing = 0.0
        for number, (block, steps) in enumerate(self.blocks):
            for place, (step, units) in enumerate(zip(self.work.steps, steps, strict=True)):
                if int(step.step > 0) != phase:
                    continue
                weight = step.weight * block.count
                for server, amount in working[number][place].items():
                    busy[server] = busy.get(server, 0.0) + weight * amount
                widening += weight * sum(unit.dequantize for unit in units)
                if self.decision.kv_format in QUANTIZED:
                    packing += weight * sum(batch.quantize for unit in units for batch in unit.batches)
        return PhaseSeconds(seconds, busiest(busy), widening, packing)


def chain_timeline(job: Job, costs: DeviceCosts, decision: Decision, *, every_step: bool = False) -> list[Timed]:
    """Begin and end of each task of the first block's sampled steps, or of all."""
    work = ChainWork(job, costs, decision)
    if every_step:
        work.steps = tuple(Step(step, 1.0) for step in range(job.gen_len))
    graph = Graph()
    block = next(job.blocks(decision.micro_batch, decision.num_micro_batches))
    lay_out(work.block(block), decision.runtime, decision.prefetch_depth, graph.emit, decision.pipeline)
    return walk(graph.tasks, lambda task: graph.seconds[task.index])
