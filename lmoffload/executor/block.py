"""Walk the task graph of one block for real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from lmoffload.executor.meter import Meter
from lmoffload.executor.micro_batch import MicroBatch, Row
from lmoffload.executor.reader import DiskReader, Reading
from lmoffload.executor.weights import WeightStore
from lmoffload.kernels.linear import KERNELS
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.plan import Plan, kernel_for
from lmoffload_solver.schedule import Task, Unit, block_tasks


class BlockRunner:
    """Runs blocks: read tasks go to the disk's queue, compute tasks run here, in graph order."""

    def __init__(
        self,
        model: Any,
        units: tuple[Unit, ...],
        plan: Plan,
        runtime: Runtime,
        weights: WeightStore,
        reader: DiskReader,
        meter: Meter,
    ) -> None:
        self._model = model
        self._units = units
        self._plan = plan
        self._runtime = runtime
        self._weights = weights
        self._reader = reader
        self._meter = meter

    def run(
        self,
        batches: Sequence[MicroBatch],
        num_steps: int,
        full: bool,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> Iterator[tuple[int, list[Row]]]:
        """Run one block; after every step, (step, rows that finished with it).

        No gradient is recorded; the context is entered around each resumption, outside the greenlets, whose torch state is this thread's.
        """
        walk = _Walk(self, batches)
        began = time.perf_counter()
        try:
            for batch in batches:
                batch.allocate()
            finished: list[Row] = []
            step_begin = began
            for task in block_tasks(self._units, num_steps, len(batches), self._plan.prefetch_depth):
                if task.kind == "read_weights":
                    walk.read(task)
                    continue
                with torch.no_grad():
                    walk.compute(task)
                batch = batches[task.micro_batch or 0]
                if batch.logits is not None:
                    finished += batch.take_tokens(stop_ids, decode)
                    self._meter.tokens += batch.tokens_taken
                    self._meter.decode_tokens += batch.tokens_taken if task.step else 0
                if task.unit == len(self._units) - 1 and task.micro_batch == len(batches) - 1:
                    now = time.perf_counter()
                    self._meter.step(task.step, now - step_begin, full)
                    step_begin = now
                    self._meter.prompts += len(finished)
                    yield task.step, finished
                    full = full and not finished
                    finished = []
                    if all(batch.done for batch in batches):
                        return
        finally:
            self._reader.discard()
            walk.close()
            for batch in batches:
                batch.abandon()
                batch.release()


def phase_kernel(planned: str, format_name: str) -> str:
    """What the plan names for a format where that takes it, else one that takes every format."""
    named = kernel_for(planned, format_name)
    return named if format_name in KERNELS[named].formats else "fused_dot"


class _Walk:
    """What one walk over the graph keeps: reads under way, and how far computing has come."""

    def __init__(self, runner: BlockRunner, batches: Sequence[MicroBatch]) -> None:
        self._runner = runner
        self._batches = batches
        self._readings: dict[int, tuple[Task, Reading]] = {}
        self._computed = -1
        self._progress = threading.Condition()
        self._bound: tuple[int, int] | None = None

    def read(self, task: Task) -> None:
        """Hand a read task to the disk; it waits there until its buffer is free."""
        layout = self._runner._weights.layouts[task.unit]
        assert task.slot is not None
        needed = max(task.depends_on, default=-1)
        reading = Reading(layout.extents, self._runner._weights.ring[task.slot], lambda stop: self._wait_computed(needed, stop))
        self._readings[task.index] = (task, reading)
        self._runner._reader.enqueue(reading)

    def compute(self, task: Task) -> None:
        """Run one micro-batch's unit in place."""
        runner = self._runner
        assert task.micro_batch is not None
        batch, unit = self._batches[task.micro_batch], runner._units[task.unit]
        self._await_reads(task)
        if not batch.done:
            begin = time.perf_counter()
            if self._bound != (task.step, task.unit):
                runner._weights.bind(unit, task.slot)
                self._bound = (task.step, task.unit)
            prefill = task.step == 0
            planned = runner._plan.kernels.prefill if prefill else runner._plan.kernels.decode
            runner._runtime.kernel = partial(phase_kernel, planned)
            runner._runtime.batch = batch
            if unit.kind == "embed":
                reached: int | None = batch.begin(runner._model, runner._weights.table_rows, prefill)
            else:
                reached = batch.resume()
            assert reached is None or reached == task.unit + 1, "the forward does not follow the plan's units"
            runner._meter.task(task, begin, time.perf_counter())
        with self._progress:
            self._computed = task.index
            self._progress.notify_all()

    def close(self) -> None:
        self._readings.clear()

    def _await_reads(self, task: Task) -> None:
        for index in task.depends_on:
            if (waited := self._readings.pop(index, None)) is not None:
                read_task, reading = waited
                reading.wait()
                self._runner._meter.task(read_task, reading.begin_s, reading.end_s)

    def _wait_computed(self, index: int, stop: threading.Event) -> bool:
        with self._progress:
            while self._computed < index:
                if stop.is_set():
                    return False
                self._progress.wait(timeout=0.05)
        return not stop.is_set()
