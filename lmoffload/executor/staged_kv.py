"""Keys and values of one block whose home is the disk: where they lie in the file, and the buffers that they pass through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from lmoffload.executor.buffers import Slab
from lmoffload.executor.extents import Extent
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.reader import DiskReader, Reading
from lmoffload.executor.spill import DiskWriter, SpillFile, Writing
from lmoffload_solver.schedule import STAGING_BUFFERS, Spilled, Task, Unit


class StagedKV:
    """Nothing, where the plan keeps all keys and values in memory.

    Raises:
        StatedError: the disk is full, or its folder cannot be written to.
    """

    def __init__(self, batches: Sequence[MicroBatch], units: Sequence[Unit], folder: Path, reader: DiskReader) -> None:
        self._batches, self._units, self._reader = batches, units, reader
        self.spilled: dict[tuple[int, int], Spilled] = {
            (layer, number): spilled for number, batch in enumerate(batches) for layer, spilled in batch.spilled.items()
        }
        sizes = [spilled.num_bytes for spilled in self.spilled.values()]
        self._offsets = dict(zip(self.spilled, accumulate(sizes, initial=0), strict=False))
        self._slots = [Slab(max(sizes)) for _ in range(STAGING_BUFFERS)] if sizes else []
        self._file: SpillFile | None = None
        self._writer: DiskWriter | None = None
        if sizes:
            self._file = SpillFile(folder, sum(sizes))
            self._writer = DiskWriter()
            reader.attach(self._file)

    def load(self, task: Task, ready: Callable[[threading.Event], bool]) -> Reading:
        """Hand a load to the disk; it waits there until its buffer is free."""
        place = self._place(task)
        assert self._file is not None and task.kv_slot is not None
        extent = Extent(self._file.path, self._offsets[place], self.spilled[place].num_bytes, 0)
        reading = Reading((extent,), self._slots[task.kv_slot], ready)
        self._reader.enqueue(reading)
        return reading

    def stage(self, task: Task) -> None:
        """Let the keys and values that a compute task uses lie in its buffer."""
        assert task.kv_slot is not None and task.micro_batch is not None
        cache = self._batches[task.micro_batch].cache
        assert cache is not None
        cache.stage(self._place(task)[0], self._slots[task.kv_slot].bytes)

    def store(self, task: Task) -> Writing:
        """Hand a store to the disk: all of it after the prefill, the pages of the new tokens after a decode step."""
        layer, number = self._place(task)
        batch, spilled = self._batches[number], self.spilled[layer, number]
        assert self._file is not None and self._writer is not None and task.kv_slot is not None
        pages = batch.changed_pages(layer) if task.step else [(0, spilled.num_bytes)]
        view, offset = self._slots[task.kv_slot].view, self._offsets[layer, number]
        writing = Writing(self._file, [(view[begin:end], offset + begin) for begin, end in pages])
        self._writer.enqueue(writing)
        return writing

    def __enter__(self) -> StagedKV:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for what is being written, and drop the file; nothing may be being read any more."""
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._reader.detach(self._file)
            self._file.close()

    def _place(self, task: Task) -> tuple[int, int]:
        layer = self._units[task.unit].layer
        assert layer is not None and task.micro_batch is not None
        return layer, task.micro_batch
