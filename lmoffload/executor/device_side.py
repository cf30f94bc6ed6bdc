"""What an engine has beside, where its plan has accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmoffload.executor import process
from lmoffload.executor.accelerators import accelerators_of
from lmoffload.executor.attention_streams import StreamedAttention
from lmoffload.executor.cores import cores_of, nodes_here
from lmoffload.executor.host import ThreadQueue
from lmoffload.executor.meter import Meter
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.resources import Accelerator, Queue
from lmoffload.executor.stage import BoundStage, Stage, bind_model
from lmoffload.executor.stored_weights import StoredTensors
from lmoffload.executor.tiered_weights import TieredWeights
from lmoffload.kernels.device_linear import DTYPES
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import HostProcessor
from lmoffload_solver.chain_plan import decision_of
from lmoffload_solver.chain_schedule import Server
from lmoffload_solver.chain_tasks import chain_units
from lmoffload_solver.decision import Decision
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, on_device
from lmoffload_solver.report import ThreadFigures
from lmoffload_solver.schedule import Unit
from lmoffload_solver.value import Resource, TaskClass


@dataclass(frozen=True)
class DeviceSide:
    """The accelerators, the queues, the threads of the host's attention."""

    decision: Decision
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    queues: dict[Server, Queue]
    attention_pools: tuple[Pool, ...]
    """Of each stream of the host's attention."""

    @staticmethod
    def of(shape: ModelShape, plan: Plan, stored_format: str, accelerators: Sequence[Accelerator] = ()) -> DeviceSide | None:
        """None where the plan has no device.

        Args:
            stored_format: of the checkpoint, which a device of its own computes in.
            accelerators: to be used, and closed; by default those that the plan is for.

        Raises:
            StatedError: there is no such device here.
        """
        if not on_device(plan):
            return None
        decision = decision_of(shape, plan)
        count, units = decision.pipeline.num_stages, chain_units(shape, decision)
        computing, dtype = plan.threads.get("compute", 1), DTYPES.get(stored_format, torch.bfloat16)
        streams = plan.attention.streams
        attending = plan.threads.get("host_attention", 1) // streams
        groups = [attending] * streams + [computing] * count + [plan.threads.get(name, 1) for name in ("staging", "disk_io")]
        *cores, staging, disk = cores_of(groups, nodes_here())
        attention, theirs = cores[:streams], cores[streams:]
        queues: dict[Server, Queue] = {
            ("disk_read", 0): ThreadQueue("read-queue", disk),
            ("disk_write", 0): ThreadQueue("write-queue", disk),
        }
        for number, own in enumerate(attention):
            queues["host_attention", number] = ThreadQueue(f"attention-{number}", own[:1], computes=True)
        stages = []
        for index, accelerator in enumerate(accelerators or accelerators_of(plan, theirs, staging)):
            queues["device", index] = accelerator.compute
            queues["upload", index], queues["download", index] = accelerator.upload, accelerator.download
            pool = Pool(computing, theirs[index] or None)
            here, is_last = decision.pipeline.units_of(index, len(units)), index == count - 1
            stages.append(Stage(index, here, is_last, accelerator, pool, accelerator.processor(pool, dtype)))
        pools = tuple(Pool(attending, own or None) for own in attention)
        return DeviceSide(decision, units, tuple(stages), queues, pools)

    @property
    def host(self) -> HostProcessor:
        """Attends where keys and values lie on the host, in a task of the first queue of its streams."""
        first, *others = self.attention_pools
        queues = [self.queues["host_attention", number] for number in range(1, 1 + len(others))]
        return StreamedAttention(first, tuple(zip(queues, others, strict=True)))

    def bind(
        self, models: Sequence[Any], shape: ModelShape, tensors: StoredTensors, plan: Plan, reader: DiskReader, meter: Meter
    ) -> tuple[BoundStage, ...]:
        """Every weight at its home, the buffers, and a model on every accelerator. The first one's products are told to `meter`."""
        found = []
        for stage, model in zip(self.stages, models, strict=True):
            weights = TieredWeights(
                tensors, plan, self.units, reader, stage.accelerator, stage.processor, self.decision.num_buffers, stage.units
            )
            watch = meter if stage.index == 0 else Meter()
            runtime = bind_model(model, shape, self.units, weights, stage.processor, watch, stage.reached)
            found.append(BoundStage(stage, model, runtime, weights, watch))
        return tuple(found)

    @property
    def emulated(self) -> bool:
        return self.stages[0].accelerator.emulated

    @property
    def peak_bytes(self) -> list[int]:
        """Of every accelerator's memory."""
        return [stage.accelerator.memory.peak_bytes for stage in self.stages]

    def threads(self, plan: Plan, reader: DiskReader) -> dict[TaskClass, ThreadFigures]:
        """What the plan gives each class of tasks, and what its threads did."""
        ids: dict[TaskClass, list[int]] = {"compute": [], "host_attention": [], "disk_io": [*reader.native_ids], "staging": []}
        for (resource, _), queue in self.queues.items():
            ids[CLASS_OF[resource]] += queue.native_ids
        for stage in self.stages:
            ids["compute"] += stage.pool.native_ids
        for pool in self.attention_pools:
            ids["host_attention"] += pool.native_ids
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
        for pool in self.attention_pools:
            pool.close()
        for stage in self.stages:
            stage.pool.close()
            stage.accelerator.close()


CLASS_OF: dict[Resource, TaskClass] = {
    "device": "compute",
    "upload": "staging",
    "download": "staging",
    "disk_read": "disk_io",
    "disk_write": "disk_io",
    "host_attention": "host_attention",
}
"""The class of tasks that a resource does."""
