"""What an engine has beside, where its plan has a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmoffload.executor import process
from lmoffload.executor.accelerators import accelerator_of
from lmoffload.executor.cores import cores_of, nodes_here
from lmoffload.executor.device_runner import DeviceParts, DeviceRunner
from lmoffload.executor.host import ThreadQueue
from lmoffload.executor.meter import Meter
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.resources import Accelerator, Queue
from lmoffload.executor.stored_weights import StoredTensors
from lmoffload.executor.tiered_weights import TieredWeights
from lmoffload.kernels.device_linear import DTYPES
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import HostProcessor, Processor
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.chain_plan import decision_of
from lmoffload_solver.chain_tasks import chain_units
from lmoffload_solver.decision import Decision
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, on_device
from lmoffload_solver.report import ThreadFigures
from lmoffload_solver.schedule import Unit
from lmoffload_solver.value import Resource, TaskClass


@dataclass(frozen=True)
class DeviceSide:
    """The accelerator, the queues, the threads of the host's attention."""

    decision: Decision
    units: tuple[Unit, ...]
    accelerator: Accelerator
    queues: dict[Resource, Queue]
    pool: Pool
    """Of what the device computes, where the host's kernels do."""
    processor: Processor
    """Of the device."""
    attention_pool: Pool

    @staticmethod
    def of(shape: ModelShape, plan: Plan, stored_format: str, accelerator: Accelerator | None = None) -> DeviceSide | None:
        """None where the plan has no device.

        Args:
            stored_format: of the checkpoint, which a device of its own computes in.
            accelerator: to be used, and closed; by default the one that the plan is for.

        Raises:
            StatedError: there is no such device here.
        """
        if not on_device(plan):
            return None
        cores = cores_of(plan.threads, nodes_here())
        accelerator = accelerator or accelerator_of(plan, cores)
        queues: dict[Resource, Queue] = {
            "device": accelerator.compute,
            "upload": accelerator.upload,
            "download": accelerator.download,
            "disk_read": ThreadQueue("read-queue", cores.get("disk_io", ())),
            "disk_write": ThreadQueue("write-queue", cores.get("disk_io", ())),
            "host_attention": ThreadQueue("attention", cores.get("host_attention", ())[:1]),
        }
        pool = Pool(plan.threads.get("host_attention", 1), cores.get("host_attention") or None)
        decision = decision_of(shape, plan)
        computing = Pool(plan.threads.get("compute", 1), cores.get("compute"))
        processor = accelerator.processor(computing, DTYPES.get(stored_format, torch.bfloat16))
        return DeviceSide(decision, chain_units(shape, decision), accelerator, queues, computing, processor, pool)

    def weights(self, tensors: StoredTensors, plan: Plan, reader: DiskReader) -> TieredWeights:
        """Every weight at its home, and the buffers."""
        return TieredWeights(tensors, plan, self.units, reader, self.accelerator, self.processor, self.decision.num_buffers)

    def runner(
        self,
        model: Any,
        shape: ModelShape,
        plan: Plan,
        runtime: Runtime,
        weights: TieredWeights,
        reader: DiskReader,
        meter: Meter,
        kv_folder: Path,
    ) -> DeviceRunner:
        """What runs blocks."""
        parts = DeviceParts(
            model, shape, plan, self.decision, self.units, runtime, weights, reader, self.accelerator, self.queues,
            HostProcessor(self.attention_pool), meter, kv_folder,
        )  # fmt: skip
        return DeviceRunner(parts)

    def threads(self, plan: Plan, reader: DiskReader) -> dict[TaskClass, ThreadFigures]:
        """What the plan gives each class of tasks, and what its threads did."""
        queues = self.queues
        ids: dict[TaskClass, tuple[int, ...]] = {
            "compute": (*queues["device"].native_ids, *self.pool.native_ids),
            "host_attention": (*queues["host_attention"].native_ids, *self.attention_pool.native_ids),
            "disk_io": (*queues["disk_read"].native_ids, *queues["disk_write"].native_ids, *reader.native_ids),
            "staging": (*queues["upload"].native_ids, *queues["download"].native_ids),
        }
        return {
            name: ThreadFigures(planned=plan.threads.get(name, 1), cpu_s=sum(map(process.thread_cpu_s, numbers)))
            for name, numbers in ids.items()
        }

    def close(self) -> None:
        """End every thread."""
        for queue in self.queues.values():
            queue.discard()
        for queue in self.queues.values():
            queue.close()
        self.attention_pool.close()
        self.accelerator.close()
