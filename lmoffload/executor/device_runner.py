"""Walk the task graph of one block of a plan with a device for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmoffload.executor.device_batch import DeviceBatch
from lmoffload.executor.device_tasks import DeviceTasks, StageBlock, Taken
from lmoffload.executor.hidden_states import HiddenStates, HostRooms
from lmoffload.executor.meter import Meter
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.resources import Accelerator, Event, Queue
from lmoffload.executor.row import Row
from lmoffload.executor.stage import BoundStage, Stage
from lmoffload.executor.tiered_kv import TieredKV
from lmoffload.executor.waiting import Waiting
from lmoffload.kernels.processor import HostProcessor
from lmoffload_solver import counting
from lmoffload_solver.arena_memory import working_bytes
from lmoffload_solver.chain_layout import step_by_step
from lmoffload_solver.chain_schedule import WHOLE, Server, Share, server_of
from lmoffload_solver.chain_tasks import task_structure
from lmoffload_solver.decision import Decision
from lmoffload_solver.device_memory import work_bytes
from lmoffload_solver.memory import JobMemory
from lmoffload_solver.model import ModelShape
from lmoffload_solver.pipeline import Place
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import Task, Unit
from lmoffload_solver.value import Kind, Resource
from lmoffload_solver.workload import Workload

COMPUTING: frozenset[Kind] = frozenset({"compute", "compute_before_attention", "compute_after_attention"})


@dataclass(frozen=True)
class DeviceParts:
    """What blocks share."""

    shape: ModelShape
    plan: Plan
    decision: Decision
    units: tuple[Unit, ...]
    stages: tuple[BoundStage, ...]
    reader: DiskReader
    queues: Mapping[Server, Queue]
    host: HostProcessor
    """Attends where keys and values lie on the host."""
    meter: Meter
    kv_folder: Path


class DeviceRunner:
    """Runs blocks: every task goes to the queue of its resource, in graph order; a step is handed over before the one before has ended."""

    def __init__(self, parts: DeviceParts) -> None:
        self._parts = parts
        self._rooms = HostRooms()

    def run(
        self,
        batches: Sequence[MicroBatch],
        full: bool = False,
        stop_ids: frozenset[int] = frozenset(),
        decode: Callable[[Sequence[int]], str] | None = None,
        waiting: Waiting | None = None,
        short: Callable[[], bool] = lambda: False,
    ) -> Generator[tuple[int, list[Row]], None, None]:
        """Run one block; after every step, (step, rows that finished with it). As in `BlockRunner.run`, but that rows neither come nor go
        before the block has ended: waiting and short are not asked."""
        parts, own = self._parts, [batch for batch in batches if isinstance(batch, DeviceBatch)]
        with ExitStack() as stack:
            blocks = [stack.enter_context(self._on_stage(stage, own)) for stage in parts.stages]
            parts.meter.spilled_bytes = max(parts.meter.spilled_bytes, sum(block.kv.bytes["disk"] for block in blocks))
            tasks = DeviceTasks(parts, blocks, stop_ids, decode)
            walk = _Walk(parts, own, tasks, max(batch.most_steps for batch in own))
            try:
                yield from self._steps(walk, tasks, own, full)
            finally:
                _empty(parts.queues)
                for stage in range(len(blocks)):
                    parts.queues["device", stage].enqueue(partial(tasks.abandon, stage)).wait()

    @contextmanager
    def _on_stage(self, bound: BoundStage, batches: Sequence[DeviceBatch]) -> Iterator[StageBlock]:
        """What one accelerator has of a block. The batches that are given are the last one's: tokens are chosen there."""
        parts, stage = self._parts, bound.stage
        own = batches if stage.is_last else [self._like(batch, stage) for batch in batches]
        working, memory = self._working_bytes(own, stage.accelerator), stage.accelerator.memory
        hidden = HiddenStates(stage.accelerator, self._rooms)
        memory.charge(working, "what is computed with")
        try:
            for batch in own:
                batch.allocate()
            layers = parts.decision.pipeline.layers_of(stage.index, parts.shape.num_layers)
            with TieredKV(own, parts.decision.kv, layers, stage.accelerator, parts.reader, parts.kv_folder) as kv:
                yield StageBlock(bound, own, kv, hidden)
        finally:
            memory.release(working)
            hidden.clear()
            for batch in own:
                batch.release()

    def _like(self, batch: DeviceBatch, stage: Stage) -> DeviceBatch:
        """The same rows, computed on another accelerator."""
        return DeviceBatch(batch.index, batch.rows, self._parts.shape, self._parts.plan, stage.processor)

    def _working_bytes(self, batches: Sequence[DeviceBatch], accelerator: Accelerator) -> int:
        """What a unit takes of the device's memory while it computes, as it is counted: torch's own allocator has it."""
        parts = self._parts
        if not accelerator.emulated:
            rows, eager = max(len(batch.rows) for batch in batches), parts.decision.runtime.attending == "eager"
            longest = max(len(row.tokens) for batch in batches for row in batch.rows)
            return int(work_bytes(parts.shape, rows, longest, eager=eager))
        lengths = [[len(row.tokens) for row in batch.rows] for batch in batches]
        workload = Workload.of_lengths([length for one in lengths for length in one], 1)
        memory, multiple = JobMemory(parts.shape, workload, 0), counting.token_multiple(parts.shape)
        longest, threads = workload.max_prompt_len, parts.plan.threads.get("compute", 1)
        sizes = [(counting.padded(sum(one), multiple), len(one)) for one in lengths]
        return max(int(working_bytes(memory, tokens, rows, longest, threads)) for tokens, rows in sizes)

    def _steps(
        self, walk: _Walk, tasks: DeviceTasks, batches: Sequence[DeviceBatch], full: bool
    ) -> Iterator[tuple[int, list[Row]]]:
        meter, end_s = self._parts.meter, walk.begin_s
        left = sum(len(batch.rows) for batch in batches)  # not batch.done: the next step may have ended meanwhile
        for step in walk.steps():
            began_s, end_s = end_s, walk.end_s(step)
            finished = tasks.finished.pop(step, [])
            meter.step(step, end_s - began_s, full)
            taken = tasks.taken.pop(step, Taken())
            meter.tokens += taken.tokens
            meter.held_tokens += taken.held
            meter.decode_tokens += taken.tokens if step else 0
            meter.places += sum(len(batch.rooms) for batch in batches)
            meter.room_tokens += sum(sum(batch.rooms) for batch in batches)
            meter.prompts += len(finished)
            yield step, finished
            full, left = full and not finished, left - len(finished)
            if not left:
                return


class _Walk:
    """Hands the tasks of a block over as the schedule emits them."""

    def __init__(self, parts: DeviceParts, batches: Sequence[DeviceBatch], tasks: DeviceTasks, num_steps: int) -> None:
        self._parts, self._tasks, self._num_steps = parts, tasks, num_steps
        self._structure = task_structure(parts.shape, parts.decision, len(batches), num_steps)
        self._under_way: dict[int, tuple[Task, Event]] = {}
        self._ends: dict[int, list[Event]] = {}
        """Of the output head's tasks, by step."""
        self._next = 0
        self.begin_s = time.perf_counter()

    def steps(self) -> Iterator[int]:
        """Each step, when it has ended; the next one has been handed over before."""
        decision = self._parts.decision
        handed_over = step_by_step(self._structure, decision.runtime, decision.prefetch_depth, self.emit, decision.pipeline)
        self._hand_over(handed_over)
        for step in range(self._num_steps):
            self._hand_over(handed_over)
            for event in self._ends[step]:
                event.wait()
            self._count()
            yield step
        while self._under_way:
            for _, event in list(self._under_way.values()):
                event.wait()
            self._count()

    def _hand_over(self, steps: Iterator[float]) -> None:
        """The tasks of one more step."""
        begin_s = time.thread_time()
        next(steps, None)
        self._parts.meter.control_s += time.thread_time() - begin_s

    def end_s(self, step: int) -> float:
        """When a step ended."""
        return max(event.end_s for event in self._ends.pop(step))

    def emit(
        self, resource: Resource, kind: Kind, place: Place, seconds: float, after: tuple[float, ...], share: Share = WHOLE
    ) -> float:
        """See `chain_schedule.Emit`; a handle is a task's number."""
        step, unit, batch = place.step, place.unit, place.batch
        before = sorted({int(handle) for handle in after if handle >= 0})
        waits = [self._under_way[number][1] for number in before if number in self._under_way]
        run, server = self._tasks.run(resource, kind, place, share), server_of(resource, place.stage)
        event = self._parts.queues[server].enqueue(run, waits)
        task = Task(self._next, kind, step, unit, batch, resource, 0, tuple(before), stage=server[1])
        self._under_way[task.index] = (task, event)
        if unit == len(self._parts.units) - 1 and kind == "compute":
            self._ends.setdefault(step, []).append(event)
        self._next += 1
        return task.index

    def _count(self) -> None:
        """Count what has ended; raises what ended a task early."""
        ended = [number for number, (_, event) in self._under_way.items() if event.done]
        meter, spans = self._parts.meter, []
        for number in ended:
            task, event = self._under_way.pop(number)
            event.wait()
            meter.task(task, event.begin_s, event.end_s)
            if task.kind in COMPUTING:
                meter.computed("decode" if task.step else "prefill", event.end_s - event.begin_s)
            spans.append((event.begin_s, event.end_s))
        meter.together(spans)


def _empty(queues: Mapping[Server, Queue]) -> None:
    for queue in queues.values():
        queue.discard()
    for queue in queues.values():
        queue.drain()
