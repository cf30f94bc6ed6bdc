"""Walk the task graph of one block for real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmoffload.executor.meter import Meter
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.reader import DiskReader, Reading
from lmoffload.executor.row import Row
from lmoffload.executor.spill import Writing
from lmoffload.executor.staged_kv import StagedKV
from lmoffload.executor.waiting import Waiting
from lmoffload.executor.weights import WeightStore
from lmoffload.kernels.linear import KERNELS
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.costs import Phase
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
        kv_folder: Path,
    ) -> None:
        self._model = model
        self._units = units
        self._plan = plan
        self._runtime = runtime
        self._weights = weights
        self._reader = reader
        self._meter = meter
        self._kv_folder = kv_folder

    def run(
        self,
        batches: Sequence[MicroBatch],
        full: bool = False,
        stop_ids: frozenset[int] = frozenset(),
        decode: Callable[[Sequence[int]], str] | None = None,
        waiting: Waiting | None = None,
        short: Callable[[], bool] = lambda: False,
    ) -> Generator[tuple[int, list[Row]], None, None]:
        """Run one block until all its rows have finished; after every step, (step, rows that finished with it).

        full: it is as large as the largest. stop_ids: tokens that end a row. decode: text of tokens, for stop strings. waiting: rows that
        take the places of those that finish before others. short: asked after every step whether memory is; some rows then go back to wait.

        No gradient is recorded; the context is entered around each resumption, outside the greenlets, whose torch state is this thread's.
        """
        with StagedKV(batches, self._units, self._kv_folder, self._reader) as staged:
            walk = _Walk(self, batches, staged)
            try:
                for batch in batches:
                    batch.allocate()
                tasks = block_tasks(self._units, walk.num_steps, len(batches), self._plan.prefetch_depth, staged.spilled)
                for step, finished in self._steps(walk, tasks, batches, full, stop_ids, decode):
                    yield step, finished
                    if waiting is not None:
                        self._change(batches, waiting, short)
                    walk.step_ended(step)
            finally:
                self._reader.discard()
                walk.close()
                for batch in batches:
                    batch.abandon()
                    batch.release()

    def _change(self, batches: Sequence[MicroBatch], waiting: Waiting, short: Callable[[], bool]) -> None:
        """Between two steps rows go and come."""
        if all(batch.done for batch in batches):
            return
        if short():
            waiting.shrink(batches)
        elif not waiting.fill(batches):
            return
        self._meter.keep_spans = False  # nothing is predicted for what follows

    def _steps(
        self,
        walk: _Walk,
        tasks: Iterator[Task],
        batches: Sequence[MicroBatch],
        full: bool,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> Iterator[tuple[int, list[Row]]]:
        finished: list[Row] = []
        had_prompts, step_begin = False, time.perf_counter()
        for task in tasks:
            if task.kind != "compute":
                walk.hand_over(task)
                continue
            with torch.no_grad():
                walk.compute(task)
            batch = batches[task.micro_batch or 0]
            if batch.logits is not None:
                finished += batch.take_tokens(stop_ids, decode)
                self._meter.tokens += batch.tokens_taken
                self._meter.held_tokens += batch.tokens_held
                self._meter.decode_tokens += batch.tokens_taken - batch.first_tokens_taken
                had_prompts = had_prompts or batch.first_tokens_taken > 0
            if task.unit == len(self._units) - 1 and task.micro_batch == len(batches) - 1:
                now = time.perf_counter()
                self._meter.step(task.step, now - step_begin, full)
                self._meter.places += sum(len(batch.rooms) for batch in batches)
                self._meter.room_tokens += sum(sum(batch.rooms) for batch in batches)
                step_begin = now
                if had_prompts and self._runtime.processor.pool is not None:
                    self._runtime.processor.pool.give_back()  # decode steps need less, and other memory meanwhile
                had_prompts = False
                self._meter.prompts += len(finished)
                yield task.step, finished
                full = full and not finished
                finished = []
                if all(batch.done for batch in batches):
                    return


def phase_kernel(planned: str, format_name: str) -> str:
    """What the plan names for a format where that takes it, else one that takes every format."""
    named = kernel_for(planned, format_name)
    return named if format_name in KERNELS[named].formats else "fused_dot"


class _Walk:
    """What one walk over the graph keeps: reads under way, and how far computing has come."""

    def __init__(self, runner: BlockRunner, batches: Sequence[MicroBatch], staged: StagedKV) -> None:
        self._runner = runner
        self._batches = batches
        self._staged = staged
        self._readings: dict[int, tuple[Task, Reading]] = {}
        self._writings: dict[int, tuple[Task, Writing]] = {}
        self._stores: set[int] = set()
        """All store tasks so far; one without a writing has ended."""
        self._computed = -1
        self._progress = threading.Condition()
        self._bound: tuple[int, int] | None = None
        self._num_steps = 0
        self._phase: Phase | None = None
        self._since = 0.0
        self.step_ended(-1)

    def num_steps(self) -> int:
        """Steps of the block, as far as is known: rows may end earlier, and others take their places."""
        return self._num_steps

    def step_ended(self, step: int) -> None:
        """All rows have the tokens of this step, and those that come in are there."""
        self._num_steps = step + 1 + max(batch.most_steps for batch in self._batches)

    def hand_over(self, task: Task) -> None:
        """Hand a transfer to its disk queue; a read waits there until its buffer is free."""
        if task.kind == "store_kv":
            self._stores.add(task.index)
            assert task.micro_batch is not None
            if not self._batches[task.micro_batch].done:
                self._writings[task.index] = (task, self._staged.store(task))
            return
        computed = [index for index in task.depends_on if index not in self._stores]
        written = [self._writings[index][1] for index in task.depends_on if index in self._writings]
        needed = max(computed, default=-1)

        def ready(stop: threading.Event) -> bool:
            return self._wait_computed(needed, stop) and all(_wait_written(writing, stop) for writing in written)

        if task.kind == "load_kv":
            self._readings[task.index] = (task, self._staged.load(task, ready))
            return
        layout = self._runner._weights.layouts[task.unit]
        assert task.slot is not None
        reading = Reading(layout.extents, self._runner._weights.ring[task.slot], ready)
        self._readings[task.index] = (task, reading)
        self._runner._reader.enqueue(reading)

    def compute(self, task: Task) -> None:
        """Run one micro-batch's unit in place."""
        runner = self._runner
        assert task.micro_batch is not None
        batch, unit = self._batches[task.micro_batch], runner._units[task.unit]
        self._await(task)
        if not batch.done:
            begin = self._since = time.perf_counter()
            if self._bound != (task.step, task.unit):
                runner._weights.bind(unit, task.slot)
                self._bound = (task.step, task.unit)
            runner._runtime.batch = batch
            if task.kv_slot is not None:
                self._staged.stage(task)
            if unit.kind == "embed":
                reached: int | None = batch.begin(runner._model, runner._weights.table_rows, self._enter)
                for forward in batch.forwards:
                    runner._meter.forward(*forward)
                runner._meter.padding_tokens += batch.padding
            else:
                reached = batch.resume(unit.kind == "head", self._enter)
            assert reached is None or reached == task.unit + 1, "the forward does not follow the plan's units"
            end = self._leave()
            if batch.computed:  # its layer was computed in one go with others
                span = batch.computed.pop(0)
                begin, end = span if len(batch.forwards) == 1 else (begin, end)
            runner._meter.task(task, begin, end)
        with self._progress:
            self._computed = task.index
            self._progress.notify_all()

    def _enter(self, phase: Phase) -> None:
        """A forward of this phase goes on."""
        self._leave()
        runner, kernels = self._runner, self._runner._plan.kernels
        runner._runtime.kernel = partial(phase_kernel, kernels.prefill if phase == "prefill" else kernels.decode)
        runner._meter.phase = self._phase = phase

    def _leave(self) -> float:
        """Count what has been computed since the last forward of this task went on, or since its begin; returns the time."""
        now = time.perf_counter()
        if self._phase is not None:
            self._runner._meter.computed(self._phase, now - self._since)
            self._phase, self._since = None, now
        return now

    def close(self) -> None:
        self._readings.clear()
        self._writings.clear()

    def _await(self, task: Task) -> None:
        """Wait for what a compute task depends on, and count every transfer that has ended."""
        meter = self._runner._meter
        for index in task.depends_on:
            if (waited := self._readings.pop(index, None)) is not None:
                read_task, reading = waited
                reading.wait()
                meter.task(read_task, reading.begin_s, reading.end_s)
            elif index in self._writings:
                self._writings[index][1].wait()
        for index in [index for index, (_, writing) in self._writings.items() if writing.done.is_set()]:
            write_task, writing = self._writings.pop(index)
            writing.wait()
            meter.task(write_task, writing.begin_s, writing.end_s)

    def _wait_computed(self, index: int, stop: threading.Event) -> bool:
        with self._progress:
            while self._computed < index:
                if stop.is_set():
                    return False
                self._progress.wait(timeout=0.05)
        return not stop.is_set()


def _wait_written(writing: Writing, stop: threading.Event) -> bool:
    while not writing.done.wait(timeout=0.05):
        if stop.is_set():
            return False
    return writing.error is None and not stop.is_set()
