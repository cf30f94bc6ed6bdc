"""Processors: who multiplies and attends. The swapped parts of a model and the micro-batches know only this interface.

`HostProcessor` has the compiled kernels and the threads of a pool, and computes in fp32. `DeviceProcessor` has torch's own operators on a
torch device, which keep the dtype they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lmoffload.kernels.attention import prefill_attention
from lmoffload.kernels.decode_attention import Newest, decode_attention
from lmoffload.kernels.device_attention import device_decode_attention, device_prefill_attention
from lmoffload.kernels.device_linear import device_linear
from lmoffload.kernels.kv_rows import KVRows, Numbers
from lmoffload.kernels.linear import linear
from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.pool import Pool


class Processor(Protocol):
    """Computes on tensors of its own device and dtype."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""

    @property
    def pool(self) -> Pool | None:
        """Threads that store keys and values; None where there are none."""

    def product(self, x: torch.Tensor, matrix: Matrix, kernel: str, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K] contiguous times the stored matrix [N, K] -> [M, N]."""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[tuple[int, int]], **options: Any
    ) -> torch.Tensor:
        """See `attention.prefill_attention`."""

    def decode(
        self, q: torch.Tensor, keys: KVRows, values: KVRows, rows: Numbers, lengths: Numbers, newest: Newest, **options: Any
    ) -> torch.Tensor:
        """See `decode_attention.decode_attention`."""


@dataclass(frozen=True)
class HostProcessor:
    """The host's compiled kernels."""

    pool: Pool
    device = torch.device("cpu")
    dtype = torch.float32

    def product(self, x: torch.Tensor, matrix: Matrix, kernel: str, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, matrix, kernel, self.pool, bias)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[tuple[int, int]], **options: Any
    ) -> torch.Tensor:
        return prefill_attention(q, k, v, segments, pool=self.pool, **options)

    def decode(
        self, q: torch.Tensor, keys: KVRows, values: KVRows, rows: Numbers, lengths: Numbers, newest: Newest, **options: Any
    ) -> torch.Tensor:
        return decode_attention(q, keys, values, rows, lengths, pool=self.pool, newest=newest, **options)


@dataclass(frozen=True)
class DeviceProcessor:
    """Torch's operators on a device, and Triton's kernels where there is Triton."""

    device: torch.device
    dtype: torch.dtype
    pool = None

    def product(self, x: torch.Tensor, matrix: Matrix, kernel: str, bias: torch.Tensor | None) -> torch.Tensor:
        return device_linear(x, matrix, kernel, bias)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[tuple[int, int]], **options: Any
    ) -> torch.Tensor:
        return device_prefill_attention(q, k, v, segments, **options)

    def decode(
        self, q: torch.Tensor, keys: KVRows, values: KVRows, rows: Numbers, lengths: Numbers, newest: Newest, **options: Any
    ) -> torch.Tensor:
        for kept, one in ((keys, newest.key), (values, newest.value)):
            kept.store_tokens(rows, lengths - 1, one)
        return device_decode_attention(q, keys, values, rows, lengths, **options)
