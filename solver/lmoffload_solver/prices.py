"""What all candidates of a job on a machine share: capacities, prices of tasks, sizes of blocks; made once each."""

from __future__ import annotations

from functools import cache

from lmoffload_solver.blocks import JobCosts, blocks_of, lengths_of
from lmoffload_solver.costs import DiskCosts, MachineCosts, chain_of
from lmoffload_solver.kv_homes import TransferCosts
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.memory import Capacity, JobMemory
from lmoffload_solver.model import ModelShape
from lmoffload_solver.threads import disk_threads
from lmoffload_solver.variants import Variant
from lmoffload_solver.workload import Limits, Workload


class Prices:
    """One job on one machine under the user's limits."""

    def __init__(self, model: ModelShape, machine: MachineProfile, disk: Disk, workload: Workload, limits: Limits) -> None:
        self.model, self.machine, self.workload = model, machine, workload
        self.capacity = Capacity.of(model, machine, limits, disk)
        self.tiers = chain_of(machine)
        self.io_threads = disk_threads(disk)
        self.disk = DiskCosts(disk, self.io_threads)
        lengths = lengths_of(workload)
        self.blocks = cache(lambda block_rows: blocks_of(lengths, block_rows))
        self.costs = cache(lambda threads: MachineCosts(machine, self.disk, threads))
        self.kept = cache(lambda variant: variant.of(model))
        self.memory = cache(lambda kv_format: JobMemory(model, workload, machine.base_bytes, kv_format, kv_format))
        self.transfers = cache(lambda kv_format: TransferCosts(self.memory(kv_format).kv, self.disk, workload.gen_len))
        self.job = cache(self._job)
        self.read_seconds = cache(self.disk.read_seconds)

    def within_weights(self, memory_bytes: int) -> int:
        """The user's limit on weights applied to the room for matrices."""
        weights = self.capacity.weights_bytes
        return memory_bytes if weights is None else min(memory_bytes, weights - self.memory("fp32").vectors_bytes)

    @property
    def linear_threads(self) -> tuple[int, ...]:
        """Numbers of compute threads that linear layers were measured with."""
        return tuple(sorted({curve.threads for curve in self.machine.linear}))

    def _job(self, threads: int, variant: Variant) -> JobCosts:
        return JobCosts(self.kept(variant), self.workload, self.costs(threads), kv_format=variant.kv_format)
