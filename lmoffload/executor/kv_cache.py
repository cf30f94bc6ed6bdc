"""Keys and values of one micro-batch in host memory, every row with exactly the room it needs.

How a row lies in each format is said in `lmoffload.kernels.kv_rows`. Where a layer has a sliding window, a row has room for it at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmoffload.executor.buffers import Slab
from lmoffload.kernels.kv_rows import KVRows, Numbers, keys_of, values_of
from lmoffload.kernels.pool import Pool
from lmoffload_solver import counting
from lmoffload_solver.model import LayerShape
from lmoffload_solver.plan import KVFormat


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    shape: LayerShape
    keys: KVRows
    values: KVRows

    @staticmethod
    def allocate(shape: LayerShape, row_tokens: Sequence[int], formats: KVFormat) -> LayerCache:
        """Room for `row_tokens[r]` tokens of each row (fewer under a sliding window)."""
        key_rooms = [counting.key_room(shape, tokens, formats.key) for tokens in row_tokens]
        value_rooms = [counting.kv_tokens(shape, tokens) for tokens in row_tokens]
        heads = shape.num_kv_heads
        key_sizes = [heads * counting.key_head_bytes(shape.key_dim, room, formats.key) for room in key_rooms]
        value_sizes = [heads * room * counting.value_token_bytes(shape.value_dim, formats.value) for room in value_rooms]
        return LayerCache(
            shape,
            keys_of(formats.key, heads, shape.key_dim, _bytes(sum(key_sizes)), _starts(key_sizes), np.array(key_rooms, dtype=np.int64)),
            values_of(
                formats.value, heads, shape.value_dim, _bytes(sum(value_sizes)), _starts(value_sizes), np.array(value_rooms, dtype=np.int64)
            ),
        )

    @property
    def num_bytes(self) -> int:
        return self.keys.data.numel() + self.values.data.numel()

    def store_prompt(self, row: int, first: int, key: torch.Tensor, value: torch.Tensor, pool: Pool | None = None) -> None:
        """Store a row's prompt from token `first` on: key [s, kv_heads, key_dim], value [s, kv_heads, value_dim]."""
        self.keys.store_run(row, first, key, pool)
        self.values.store_run(row, first, value, pool)

    def store_tokens(self, rows: Numbers, positions: Numbers, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one new token of each of `rows` at its position: key [R, kv_heads, key_dim], value [R, kv_heads, value_dim]."""
        self.keys.store_tokens(rows, positions, key)
        self.values.store_tokens(rows, positions, value)


def _bytes(count: int) -> torch.Tensor:
    return Slab(count).bytes[:count]


def _starts(sizes: Sequence[int]) -> Numbers:
    return np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)


class KVCache:
    """The layers of one micro-batch."""

    def __init__(self, layers: Sequence[LayerShape], row_tokens: Sequence[int], formats: KVFormat) -> None:
        self.layers = [LayerCache.allocate(layer, row_tokens, formats) for layer in layers]

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


def kv_bytes(layers: Sequence[LayerShape], row_tokens: Sequence[int], formats: KVFormat) -> int:
    """Bytes that a `KVCache` of these rows takes."""
    return sum(counting.layer_kv_bytes(layer, tokens, formats.key, formats.value) for layer in layers for tokens in row_tokens)
