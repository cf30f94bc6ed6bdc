"""Keys and values of one micro-batch in host memory, every row with exactly the room it needs.

Per layer two flat fp32 buffers; row r has [kv_heads, capacity_r, dim] of each from its start. Where a layer has a sliding window, a row's
capacity is at most the window and the token at position p lies at p mod capacity: softmax does not ask for order, and a row's order
depends on its own length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmoffload.executor.buffers import Slab
from lmoffload_solver.model import LayerShape


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    shape: LayerShape
    keys: torch.Tensor
    values: torch.Tensor
    key_starts: np.ndarray
    value_starts: np.ndarray
    capacities: np.ndarray

    @staticmethod
    def allocate(shape: LayerShape, row_tokens: Sequence[int]) -> LayerCache:
        """Room for `row_tokens[r]` tokens of each row (fewer under a sliding window)."""
        capacities = np.asarray([min(tokens, shape.window or tokens) for tokens in row_tokens], dtype=np.int64)
        begins = np.concatenate(([0], np.cumsum(capacities)))
        heads = shape.num_kv_heads
        return LayerCache(
            shape,
            _floats(int(begins[-1]) * heads * shape.key_dim),
            _floats(int(begins[-1]) * heads * shape.value_dim),
            begins[:-1] * heads * shape.key_dim,
            begins[:-1] * heads * shape.value_dim,
            capacities,
        )

    @property
    def num_bytes(self) -> int:
        return 4 * (self.keys.numel() + self.values.numel())

    def store_prompt(self, row: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store a row's whole prompt: key [s, kv_heads, key_dim], value [s, kv_heads, value_dim]."""
        capacity = int(self.capacities[row])
        kept = min(key.shape[0], capacity)
        first = key.shape[0] - kept
        places = torch.arange(first, key.shape[0]) % capacity if first else slice(0, kept)
        for flat, starts, new in ((self.keys, self.key_starts, key), (self.values, self.value_starts, value)):
            heads, dim = new.shape[1], new.shape[2]
            start = int(starts[row])
            room = flat[start : start + heads * capacity * dim].view(heads, capacity, dim)
            room[:, places] = new[first:].transpose(0, 1)

    def store_tokens(self, rows: np.ndarray, positions: np.ndarray, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one new token of each of `rows` at its position: key [R, kv_heads, key_dim], value [R, kv_heads, value_dim]."""
        capacities = self.capacities[rows]
        places = positions % capacities
        heads = np.arange(self.shape.num_kv_heads)
        for flat, starts, new in ((self.keys, self.key_starts, key), (self.values, self.value_starts, value)):
            dim = new.shape[2]
            first = starts[rows] // dim + places
            index = first[:, None] + heads[None, :] * capacities[:, None]
            flat.view(-1, dim)[torch.from_numpy(index.reshape(-1))] = new.reshape(-1, dim)


def _floats(count: int) -> torch.Tensor:
    return Slab(4 * count).bytes.view(torch.float32)[:count]


class KVCache:
    """The layers of one micro-batch."""

    def __init__(self, layers: Sequence[LayerShape], row_tokens: Sequence[int]) -> None:
        self.layers = [LayerCache.allocate(layer, row_tokens) for layer in layers]

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


def kv_bytes(layers: Sequence[LayerShape], row_tokens: Sequence[int]) -> int:
    """Bytes that a `KVCache` of these rows takes."""
    return sum(
        4 * layer.num_kv_heads * (layer.key_dim + layer.value_dim) * sum(min(tokens, layer.window or tokens) for tokens in row_tokens)
        for layer in layers
    )
