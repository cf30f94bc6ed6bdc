"""Weights to measure with: random bytes that are valid in a stored format, rotated through a slab of memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from lmoffload_solver.formats import QUANTIZED, format_of, stored_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from lmoffload.kernels.matrix import Matrix

PATTERN_BLOCKS = 1 << 16
SCALE_PLACES: Mapping[str, tuple[tuple[int, ...], float]] = MappingProxyType(
    {
        "q8_0": ((0,), 0.002),
        "q4_0": ((0,), 0.002),
        "q4_1": ((0, 2), 0.002),
        "q5_0": ((0,), 0.002),
        "q5_1": ((0, 2), 0.002),
        "q2_k": ((80, 82), 0.002),
        "q3_k": ((108,), 0.0005),
        "q4_k": ((0, 2), 0.0002),
        "q5_k": ((0, 2), 0.0001),
        "q6_k": ((208,), 0.00002),
    }
)
"""Bytes of a block at which fp16 scales (and minima) lie, and their size for weights of about 0.02."""
LARGEST_MATRIX_BYTES = 4 * 5632 * 2048


class WeightSlab:
    """Memory filled with weights of one format at a time, from which matrices are taken in turn."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self._bytes = torch.empty(max(num_bytes, LARGEST_MATRIX_BYTES), dtype=torch.uint8)
        self._filled: str | None = None

    def matrices(self, format_name: str, n: int, k: int) -> Iterator[Matrix]:
        """Matrices [n, k] of the slab in turn, without end."""
        from lmoffload.kernels.matrix import Matrix

        if self._filled != format_name:
            self._fill(format_name)
        size = stored_bytes((n, k), format_name)
        # From the slab's end backward: a part that the fill touched last is then read first, and long gone from the caches at the end.
        views = [self._bytes[at : at + size] for at in range(0, self._bytes.numel() - size + 1, size)]
        return itertools.cycle([Matrix(view, format_name, n, k) for view in views])

    def _fill(self, format_name: str) -> None:
        pattern = random_blocks(format_name)
        whole = self._bytes.numel() // pattern.numel()
        self._bytes[: whole * pattern.numel()].view(whole, -1).copy_(pattern)
        rest = self._bytes.numel() - whole * pattern.numel()
        self._bytes[whole * pattern.numel() :] = pattern[:rest]
        self._filled = format_name


def random_blocks(format_name: str) -> torch.Tensor:
    """Random stored blocks, uint8, of weights about 0.02 in size: none is subnormal, infinite or not a number."""
    import numpy as np
    import torch

    rng = np.random.default_rng(0)
    fmt = format_of(format_name)
    if format_name in QUANTIZED:  # bytes that are fp16 numbers near 0.003 wherever a scale or a minimum comes to lie
        return torch.from_numpy(rng.integers(0x18, 0x1C, (PATTERN_BLOCKS - 1) * fmt.block_bytes, np.uint8))
    if fmt.block_elements == 1:
        # A period that is no power of two, so that neighbouring rows of a matrix differ.
        values = torch.from_numpy(rng.standard_normal(PATTERN_BLOCKS * 4 - 3, np.float32) * np.float32(0.02))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[format_name]
        return values.to(dtype).view(torch.uint8)
    blocks = rng.integers(0, 256, (PATTERN_BLOCKS - 1, fmt.block_bytes), np.uint8)
    places, size = SCALE_PLACES[format_name]
    scales: npt.NDArray[np.float16] = rng.uniform(size / 2, size * 1.5, (PATTERN_BLOCKS - 1, len(places))).astype(np.float16)
    for i, place in enumerate(places):
        blocks[:, place : place + 2] = scales[:, i : i + 1].view(np.uint8)
    return torch.from_numpy(blocks.reshape(-1))
