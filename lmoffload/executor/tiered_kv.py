"""Keys and values of one block of a plan with a device: their homes in three tiers, and the buffers that they pass through.

A unit is the keys and values of a (layer, micro-batch). It is laid out in one way wherever it lies: keys, then values, at once behind them
or, where its home is the disk, on the next page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from lmoffload.executor.buffers import Slab
from lmoffload.executor.device_batch import DeviceBatch
from lmoffload.executor.extents import Extent
from lmoffload.executor.kv_cache import LayerCache
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.resources import Accelerator
from lmoffload.executor.spill import SpillFile
from lmoffload.kernels.kv_rows import Numbers
from lmoffload_solver.counting import whole_pages
from lmoffload_solver.decision import KVUnit
from lmoffload_solver.value import Tier

KV_BUFFERS = 2
"""On the device, and on the host for units on the disk, taken in turn."""

WORD_BYTES = 4


@dataclass(frozen=True)
class Home:
    """Where a unit lies."""

    tier: Tier
    num_bytes: int
    offset: int
    """In its tier's memory, or in the file."""


@dataclass(frozen=True)
class Changed:
    """Tokens that a decode step stored: one of each row, at its position."""

    rows: Numbers
    positions: Numbers


class TieredKV:
    """A context manager.

    Args:
        batches: whose caches are allocated.
        kv: home and attention of each layer's micro-batches.
        layers: those that are computed here.
        folder: for the file on the disk.

    Raises:
        StatedError: a tier does not hold them.
    """

    def __init__(
        self,
        batches: Sequence[DeviceBatch],
        kv: Sequence[Sequence[KVUnit]],
        layers: range,
        accelerator: Accelerator,
        reader: DiskReader,
        folder: Path,
    ) -> None:
        self._batches, self._accelerator, self._reader = batches, accelerator, reader
        used: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        self.homes: dict[tuple[int, int], Home] = {}
        for batch in batches:
            for layer in layers:
                tier = kv[layer][batch.index].home
                size = _size(batch.layer_cache(layer), paged=tier == "disk")
                self.homes[layer, batch.index] = Home(tier, size, used[tier])
                used[tier] += size
        self.bytes = dict(used)
        away = [home.num_bytes for home in self.homes.values() if home.tier != "device"]
        on_disk = [home.num_bytes for home in self.homes.values() if home.tier == "disk"]
        self._taken = used["device"] + KV_BUFFERS * max(away, default=0)
        self._on_device = accelerator.memory.allocate(used["device"], "keys and values")
        self._slots = [accelerator.memory.allocate(max(away, default=0), "keys and values on their way") for _ in range(KV_BUFFERS)]
        self._on_host = accelerator.page_locked(used["host"])
        self._staging = [accelerator.page_locked(max(on_disk)) for _ in range(KV_BUFFERS)] if on_disk else []
        self._file: SpillFile | None = None
        if on_disk:
            self._file = SpillFile(folder, used["disk"])
            reader.attach(self._file)

    def read(self, layer: int, batch: int, use: int) -> None:
        """From the disk into the staging buffer of a use; a task of the disk."""
        assert self._file is not None
        home = self.homes[layer, batch]
        self._reader.read((Extent(self._file.path, home.offset, home.num_bytes, 0),), self._staged(use))

    def load(self, layer: int, batch: int, use: int) -> None:
        """Up into the buffer of a use; a task of the upload."""
        source = self._beside(layer, batch, use)
        self._accelerator.to_device(self._slot(layer, batch, use), source)

    def store(self, layer: int, batch: int, use: int, changed: Changed | None) -> None:
        """Down from the buffer of a use: the whole unit, or what a decode step changed; a task of the download."""
        target, source = self._beside(layer, batch, use), self._slot(layer, batch, use)
        if changed is None:
            self._accelerator.to_host(target, source)
            return
        words = _words(self._batches[batch].layer_cache(layer), self.homes[layer, batch].tier == "disk", changed)
        new = source.view(torch.int32)[words]
        come = torch.empty(new.shape, dtype=new.dtype)
        self._accelerator.to_host(come.view(torch.uint8), new.view(torch.uint8))  # pageable: it has come when this returns
        target.view(torch.int32)[words] = come

    def write(self, layer: int, batch: int, use: int, changed: Changed | None) -> None:
        """From the staging buffer of a use to the disk: the whole unit, or the pages that a decode step changed; a task of the disk."""
        assert self._file is not None
        home = self.homes[layer, batch]
        pages = [(0, home.num_bytes)]
        if changed is not None:
            pages = self._batches[batch].layer_cache(layer).pages(changed.rows, changed.positions)
        view = self._staged(use).view
        for begin, end in pages:
            self._file.write_from(view[begin:end], home.offset + begin)

    def stage(self, layer: int, batch: int, use: int) -> None:
        """Let the device attend to a unit: at home there, or in the buffer of a use."""
        home = self.homes[layer, batch]
        memory = self._on_device[home.offset : home.offset + home.num_bytes] if home.tier == "device" else self._slot(layer, batch, use)
        self._place(layer, batch, memory)

    def stage_beside(self, layer: int, batch: int, use: int) -> None:
        """Let the host attend to a unit: at home there, or in the staging buffer of a use."""
        self._place(layer, batch, self._beside(layer, batch, use))

    def __enter__(self) -> TieredKV:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give everything back; no task may use it any more."""
        self._accelerator.memory.release(self._taken)
        if self._file is not None:
            self._reader.detach(self._file)
            self._file.close()

    def _beside(self, layer: int, batch: int, use: int) -> torch.Tensor:
        """A unit on the host: its home, or on its way from the disk and to it."""
        home = self.homes[layer, batch]
        if home.tier == "disk":
            return self._staged(use).bytes[: home.num_bytes]
        return self._on_host.bytes[home.offset : home.offset + home.num_bytes]

    def _staged(self, use: int) -> Slab:
        return self._staging[use % KV_BUFFERS]

    def _slot(self, layer: int, batch: int, use: int) -> torch.Tensor:
        return self._slots[use % KV_BUFFERS][: self.homes[layer, batch].num_bytes]

    def _place(self, layer: int, batch: int, memory: torch.Tensor) -> None:
        held = self._batches[batch].layer_cache(layer)
        paged = self.homes[layer, batch].tier == "disk"
        self._batches[batch].place(layer, _placed(held, memory, _middle(held, paged)))


def _size(held: LayerCache, *, paged: bool) -> int:
    values = held.values.data.numel()
    return _middle(held, paged) + (whole_pages(values) if paged else values)


def _middle(held: LayerCache, paged: bool) -> int:
    """Where values begin."""
    keys = held.keys.data.numel()
    return whole_pages(keys) if paged else keys


def _placed(held: LayerCache, memory: torch.Tensor, middle: int) -> LayerCache:
    key, value = held.keys.data.numel(), held.values.data.numel()
    return replace(
        held, keys=replace(held.keys, data=memory[:key]), values=replace(held.values, data=memory[middle : middle + value])
    )


def _words(held: LayerCache, paged: bool, changed: Changed) -> torch.Tensor:
    """Places, in words, of what a decode step stores in a unit."""
    found = []
    for kept, start in ((held.keys, 0), (held.values, _middle(held, paged))):
        begins, ends = kept.touched(changed.rows, changed.positions)
        first, counts = (start + begins) // WORD_BYTES, (ends - begins) // WORD_BYTES
        assert not ((begins | ends) % WORD_BYTES).any(), "keys and values of a token are whole words"
        before = np.concatenate(([0], np.cumsum(counts)[:-1]))
        found.append(np.repeat(first - before, counts) + np.arange(int(counts.sum())))
    return torch.from_numpy(np.concatenate(found))

