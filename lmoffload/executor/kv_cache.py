"""Keys and values of one micro-batch in host memory, every row with exactly the room it needs.

How a row lies in each format is said in `lmoffload.kernels.kv_rows`. Where a layer has a sliding window, a row has room for it at most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lmoffload.executor.buffers import Slab
from lmoffload.kernels.kv_rows import KVRows, Numbers, Run, keys_of, values_of
from lmoffload.kernels.pool import Pool
from lmoffload_solver import counting
from lmoffload_solver.model import LayerShape
from lmoffload_solver.plan import KVFormat
from lmoffload_solver.schedule import PAGE_BYTES, STORE_GAP_BYTES


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    shape: LayerShape
    keys: KVRows
    values: KVRows

    @staticmethod
    def allocate(shape: LayerShape, row_tokens: Sequence[int], formats: KVFormat, *, on_disk: bool = False) -> LayerCache:
        """Room for `row_tokens[r]` tokens of each row (fewer under a sliding window); on_disk: none yet, see `within`."""
        key_rooms = [counting.key_room(shape, tokens, formats.key) for tokens in row_tokens]
        value_rooms = [counting.kv_tokens(shape, tokens) for tokens in row_tokens]
        heads, memory = shape.num_kv_heads, _nothing if on_disk else _bytes
        key_sizes = [heads * counting.key_head_bytes(shape.key_dim, room, formats.key) for room in key_rooms]
        value_sizes = [heads * room * counting.value_token_bytes(shape.value_dim, formats.value) for room in value_rooms]
        return LayerCache(
            shape,
            keys_of(formats.key, heads, shape.key_dim, memory(sum(key_sizes)), _starts(key_sizes), np.array(key_rooms, dtype=np.int64)),
            values_of(
                formats.value, heads, shape.value_dim, memory(sum(value_sizes)), _starts(value_sizes), np.array(value_rooms, dtype=np.int64)
            ),
        )

    @property
    def num_bytes(self) -> int:
        return self.keys.data.numel() + self.values.data.numel()

    def within(self, memory: torch.Tensor) -> LayerCache:
        """The same rows in a staging buffer: keys, then values from the next page on."""
        key, value = self.keys.data.numel(), self.values.data.numel()
        middle = counting.whole_pages(key)
        keys, values = replace(self.keys, data=memory[:key]), replace(self.values, data=memory[middle : middle + value])
        return replace(self, keys=keys, values=values)

    def pages(self, rows: Numbers, positions: Numbers) -> list[tuple[int, int]]:
        """Bytes [begin, end) of the staging buffer, whole pages, that storing one more token of each row changes, with what lies between
        where that is little: one more write costs as much as writing some more bytes."""
        middle, found = counting.whole_pages(self.keys.data.numel()), []
        for kept, start in ((self.keys, 0), (self.values, middle)):
            begins, ends = kept.touched(rows, positions)
            pages = [np.arange(b, e) for b, e in zip((start + begins) // PAGE_BYTES, (start + ends - 1) // PAGE_BYTES + 1, strict=True)]
            found += pages
        touched = np.unique(np.concatenate(found))
        runs = np.split(touched, np.flatnonzero(np.diff(touched) > 1 + STORE_GAP_BYTES // PAGE_BYTES) + 1)
        return [(int(run[0]) * PAGE_BYTES, (int(run[-1]) + 1) * PAGE_BYTES) for run in runs]

    def store_prompts(self, runs: Sequence[Run], key: torch.Tensor, value: torch.Tensor, pool: Pool | None = None) -> None:
        """Store packed tokens of prompts: key [tokens, kv_heads, key_dim], value [tokens, kv_heads, value_dim]."""
        self.keys.store_runs(runs, key, pool)
        self.values.store_runs(runs, value, pool)


def _nothing(count: int) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8).expand(count)


def _bytes(count: int) -> torch.Tensor:
    return Slab(count).bytes[:count]


def _starts(sizes: Sequence[int]) -> Numbers:
    return np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)


class KVCache:
    """The layers of one micro-batch."""

    def __init__(
        self, layers: Sequence[LayerShape], row_tokens: Sequence[int], formats: KVFormat, on_disk: Collection[int] = ()
    ) -> None:
        self.layers = [LayerCache.allocate(layer, row_tokens, formats, on_disk=i in on_disk) for i, layer in enumerate(layers)]
        self._on_disk = frozenset(on_disk)

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return sum(layer.num_bytes for i, layer in enumerate(self.layers) if i not in self._on_disk)

    def stage(self, layer: int, memory: torch.Tensor) -> None:
        """Let a layer whose home is the disk lie in a staging buffer."""
        self.layers[layer] = self.layers[layer].within(memory)


def kv_bytes(layers: Sequence[LayerShape], row_tokens: Sequence[int], formats: KVFormat) -> int:
    """Bytes that a `KVCache` of these rows takes."""
    return sum(counting.layer_kv_bytes(layer, tokens, formats.key, formats.value) for layer in layers for tokens in row_tokens)
