"""The predicted timeline of a plan, task by task: the schedule walked with the machine's prices."""

from __future__ import annotations

from collections.abc import Callable

from lmoffload_solver import counting
from lmoffload_solver.blocks import Block, JobCosts, Step, StepSeconds, blocks_of
from lmoffload_solver.costs import PHASES, Contention, DiskCosts, MachineCosts, Phase, disk_of, num_requests
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.memory import spilled_of
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, kept_model
from lmoffload_solver.schedule import Spilled, Task, Unit, block_tasks, units_of
from lmoffload_solver.simulate import Timed, walk
from lmoffload_solver.value import Resource


class PlanCosts:
    """Seconds of a plan's tasks on a machine.

    Args:
        steps: the steps of a block that are priced, the prefill first; all of them unless given.

    Raises:
        StatedError: the profile lacks a disk or a curve that the plan needs.
    """

    def __init__(
        self,
        model: ModelShape,
        machine: MachineProfile,
        plan: Plan,
        *,
        file_system: str | None = None,
        steps: tuple[Step, ...] | None = None,
    ) -> None:
        self.plan = plan
        model = kept_model(model, plan)
        self.units = units_of(model, plan)
        self.steps = tuple(Step(step, 1.0) for step in range(plan.workload.gen_len)) if steps is None else steps
        self.disk = DiskCosts(disk_of(machine, file_system), plan.threads["disk_io"])
        costs = MachineCosts(machine, self.disk, plan.threads["compute"])
        self.job = JobCosts(model, plan.workload, costs, self.steps, kv_format=plan.kv.format.key)
        self.blocks = blocks_of(self.job.lengths, plan.micro_batch * plan.num_micro_batches)
        self._head_rows = sum(unit.end_row - unit.first_row for unit in self.units if unit.kind == "head")
        self._table_on_disk = plan.weights.tensors[model.embedding.name].tier == "disk"

    def spilled(self, block: Block) -> dict[tuple[int, int], Spilled]:
        """Keys and values of a block that the plan keeps on the disk."""
        lengths = self.job.lengths[block.first_row : block.end_row]
        return spilled_of(self.job.model, self.plan, [length + self.plan.workload.gen_len for length in lengths])

    def read_seconds(self, unit: Unit) -> float:
        """Seconds to read what a unit streams, alone."""
        return self.disk.read_seconds(unit.streamed_bytes, num_requests([piece.num_bytes for piece in unit.streamed]))

    def compute_seconds(self, unit: Unit, seconds: StepSeconds) -> float:
        """Seconds to compute a unit, alone, of the micro-batches that `seconds` are of."""
        if unit.kind == "embed":
            return seconds.lookup if self._table_on_disk else 0.0
        if unit.layer is not None:
            names = [tensor.name for tensor in counting.layer_matrices(self.job.model, unit.layer)]
            return self.job.part_seconds(unit.layer, seconds, [names.index(name) for name in unit.computes], unit.kind == "layer")
        share = (unit.end_row - unit.first_row) / self._head_rows
        return seconds.head * share + seconds.piece + (seconds.around if unit is self.units[-1] else 0.0)

    def of_block(self, block: Block) -> Callable[[Task], float]:
        """Seconds of each task of a block whose steps are those priced, slowed where reading and computing run at once."""
        batches = block.micro_batches(self.plan.micro_batch)
        priced = [self._steps_seconds(Block(first, end, 1)) for first, end in batches]
        reads = [self.read_seconds(unit) for unit in self.units]
        spilled = self.spilled(block)
        loads = sum(self._load_seconds(one.num_bytes) for one in spilled.values())
        ahead = self.plan.prefetch_depth or (loads and len(self.steps) > 1)
        slow = self.job.costs.contention if ahead else Contention()
        scales = []
        for step in range(len(self.steps)):
            compute = sum(self.compute_seconds(unit, one[step]) for one in priced for unit in self.units)
            read = sum(reads) + (loads if step else 0.0)
            read_s, compute_s = slow.stretched(read, compute) if read else (0.0, compute)
            scales.append((read_s / read if read else 1.0, compute_s / compute))

        def seconds(task: Task) -> float:
            read_scale, compute_scale = scales[task.step]
            if task.kind == "load_kv":
                return self._load_seconds(task.num_bytes) * read_scale
            if task.kind == "store_kv":
                assert task.micro_batch is not None
                layer = self.units[task.unit].layer
                assert layer is not None
                return self.disk.write_seconds(task.num_bytes, spilled[layer, task.micro_batch].step_writes if task.step else 1)
            if task.micro_batch is None:
                return reads[task.unit] * read_scale
            return self.compute_seconds(self.units[task.unit], priced[task.micro_batch][task.step]) * compute_scale

        return seconds

    def _load_seconds(self, num_bytes: int) -> float:
        return self.disk.read_seconds(num_bytes, num_requests([num_bytes]))

    def _steps_seconds(self, block: Block) -> tuple[StepSeconds, ...]:
        kernels, size, cut = self.plan.kernels, self.plan.micro_batch, self.plan.stream == "matrix"
        prefill = self.job.steps_seconds(block, size, "prefill", kernels.prefill, self.plan.prefill_chunk, cut=cut)
        return (*prefill, *self.job.steps_seconds(block, size, "decode", kernels.decode, cut=cut))


def block_timeline(costs: PlanCosts, block: Block | None = None) -> list[Timed]:
    """Begin and end of each task of one block (the first unless given), its ring buffers empty at the start."""
    block = costs.blocks[0] if block is None else block
    batches = len(block.micro_batches(costs.plan.micro_batch))
    tasks = block_tasks(costs.units, len(costs.steps), batches, costs.plan.prefetch_depth, costs.spilled(block))
    return walk(tasks, costs.of_block(block))


def job_busy(costs: PlanCosts) -> dict[Phase, dict[Resource, float]]:
    """Seconds that each resource works in each phase of the whole job, sampled steps weighted with what they stand for."""
    busy: dict[Phase, dict[Resource, float]] = {phase: {} for phase in PHASES}
    for block in costs.blocks:
        for timed in block_timeline(costs, block):
            step, of_phase = costs.steps[timed.task.step], busy["decode" if timed.task.step else "prefill"]
            seconds = block.count * step.weight * (timed.end_s - timed.begin_s)
            of_phase[timed.task.resource] = of_phase.get(timed.task.resource, 0.0) + seconds
    return busy
