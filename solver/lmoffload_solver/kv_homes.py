"""Where keys and values are at home when some layers keep theirs on the disk: which layers, how many bytes, how long the transfers take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from lmoffload_solver import counting
from lmoffload_solver.blocks import Block, Step, lengths_of
from lmoffload_solver.costs import DiskCosts, num_requests
from lmoffload_solver.counting import Array
from lmoffload_solver.model import LayerShape, ModelShape
from lmoffload_solver.schedule import STAGING_BUFFERS, Spilled
from lmoffload_solver.workload import Workload


def layers_on_disk(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers, spread evenly."""
    return tuple(layer for layer in range(num_layers) if (layer + 1) * count // num_layers > layer * count // num_layers)


class KVHomes:
    """Bytes of a job's keys and values. Those of a run of sequences are differences of running sums."""

    def __init__(self, model: ModelShape, workload: Workload, key_format: str = "fp32", value_format: str = "fp32") -> None:
        self._layers, self._formats = model.layers, (key_format, value_format)
        distinct, inverse = np.unique(np.array(lengths_of(workload), dtype=np.int64), return_inverse=True)
        tokens = [int(length) + workload.gen_len for length in distinct]
        self._keys: dict[LayerShape, npt.NDArray[np.int64]] = {}
        self._all: dict[LayerShape, npt.NDArray[np.int64]] = {}
        for shape in dict.fromkeys(model.layers):
            key = [counting.layer_key_bytes(shape, most, key_format) for most in tokens]
            both = [counting.layer_kv_bytes(shape, most, key_format, value_format) for most in tokens]
            self._keys[shape] = np.concatenate(([0], np.cumsum(np.array(key, dtype=np.int64)[inverse])))
            self._all[shape] = np.concatenate(([0], np.cumsum(np.array(both, dtype=np.int64)[inverse])))
        self.num_rows, self._count = len(inverse), Counter(model.layers)
        self.host_bytes, self.disk_bytes = cache(self._host_bytes), cache(self._disk_bytes)
        self.shapes_on_disk = cache(self._shapes_on_disk)

    def _shapes_on_disk(self, count: int) -> Counter[LayerShape]:
        return Counter(self._layers[layer] for layer in layers_on_disk(len(self._layers), count))

    def _host_bytes(self, micro_batch: int, block_rows: int, count: int) -> int:
        """Of the first block, with `count` layers on the disk: what stays in memory, and the staging buffers."""
        rows = min(block_rows, self.num_rows)
        on_disk = self.shapes_on_disk(count)
        kept = sum((self._count[shape] - on_disk[shape]) * int(running[rows]) for shape, running in self._all.items())
        largest = max((self.spilled(shape, 0, min(micro_batch, rows)).num_bytes for shape in on_disk), default=0)
        return kept + STAGING_BUFFERS * largest

    def _disk_bytes(self, micro_batch: int, block_rows: int, count: int) -> int:
        """Of the first block on the disk."""
        rows = min(block_rows, self.num_rows)
        batches = [(first, min(first + micro_batch, rows)) for first in range(0, rows, micro_batch)]
        on_disk = self.shapes_on_disk(count)
        return sum(number * self.spilled(shape, *batch).num_bytes for shape, number in on_disk.items() for batch in batches)

    def spilled(self, shape: LayerShape, first_row: int, end_row: int) -> Spilled:
        """As `counting.spilled`, of rows [first, end) of the job."""
        key = int(self._keys[shape][end_row] - self._keys[shape][first_row])
        both = int(self._all[shape][end_row] - self._all[shape][first_row])
        return counting.spilled_bytes(shape, key, both - key, end_row - first_row, self._formats[1])


@dataclass(frozen=True)
class Transfers:
    """Seconds of the transfers of one layer's keys and values, by micro-batch."""

    load: tuple[float, ...]
    make: tuple[float, ...]
    """The store behind the prefill."""
    add: tuple[float, ...]
    """The store behind a decode step."""


class TransferCosts:
    """Prices of a job's transfers."""

    def __init__(self, homes: KVHomes, disk: DiskCosts, gen_len: int) -> None:
        self.homes, self._disk, self._last = homes, disk, gen_len - 1
        self.of = cache(self._of)

    def _of(self, shape: LayerShape, block: Block, micro_batch: int) -> Transfers:
        """Those of a layer of some shape."""
        sizes = [self.homes.spilled(shape, first, end) for first, end in block.micro_batches(micro_batch)]
        return Transfers(
            tuple(self._disk.read_seconds(one.num_bytes, num_requests([one.num_bytes])) for one in sizes),
            tuple(self._disk.write_seconds(one.num_bytes) for one in sizes),
            tuple(self._disk.write_seconds(one.step_bytes, one.step_writes) for one in sizes),
        )

    def least(self, blocks: tuple[Block, ...], steps: tuple[Step, ...], micro_batch: int, count: int) -> tuple[Array, Array]:
        """Seconds of loading and of storing that fall into each step of each block at least: one load may have been done in the step
        before, and as many stores as there are staging buffers may be done in the next."""
        load, store = [], []
        for block in blocks:
            known = [(number, self.of(shape, block, micro_batch)) for shape, number in self.homes.shapes_on_disk(count).items()]
            for step in steps:
                loads = [(number, one.load) for number, one in known] if step.step else []
                stores = [(number, one.add if step.step else one.make) for number, one in known] if step.step < self._last else []
                load.append(_but(1, loads))
                store.append(_but(STAGING_BUFFERS, stores))
        return np.array(load), np.array(store)


def _but(count: int, seconds: list[tuple[int, tuple[float, ...]]]) -> float:
    """The sum of all but `count` of the longest."""
    total = sum(number * sum(of_layer) for number, of_layer in seconds)
    return max(0.0, total - count * max((max(of_layer) for _, of_layer in seconds), default=0.0))
