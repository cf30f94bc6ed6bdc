"""Storage formats: how many bytes a tensor of a shape takes in each.

A format is described, not programmed: a block of `block_elements` elements along the last dimension takes `block_bytes` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from lmoffload_solver.errors import StatedError


@dataclass(frozen=True)
class Format:
    """A storage format of a tensor."""

    name: str
    block_elements: int
    block_bytes: int
    tile_rows: int = 1
    """Rows of a matrix that are stored interleaved, so that a matrix is cut between tiles only; its last tile may hold fewer."""

    @property
    def bits_per_element(self) -> float:
        return 8 * self.block_bytes / self.block_elements


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 1, 4),
        Format("bf16", 1, 2),
        Format("fp16", 1, 2),
        # GGUF block formats, as https://github.com/ggml-org/ggml stores them: scale(s) in fp16, then the codes.
        Format("q8_0", 32, 34),
        Format("q4_0", 32, 18),
        Format("q4_1", 32, 20),
        Format("q5_0", 32, 22),
        Format("q5_1", 32, 24),
        Format("q2_k", 256, 84),
        Format("q3_k", 256, 110),
        Format("q4_k", 256, 144),
        Format("q5_k", 256, 176),
        Format("q6_k", 256, 210),
    )
}

QUANTIZED: dict[str, Format] = {
    f.name: f
    for f in (
        # The quantized store's own groups along the last dimension: codes, then one fp16 scale (int8, symmetric), or an fp16 scale and an
        # fp16 minimum (int4, asymmetric): 64 elements of int4 take 32 + 2 + 2 = 36 bytes, as FlexGen's groups do.
        Format("int8", 64, 66, tile_rows=16),
        Format("int4-g32", 32, 20, tile_rows=16),
        Format("int4-g64", 64, 36, tile_rows=16),
        Format("int4-g128", 128, 68, tile_rows=16),
    )
}
"""Formats that weights and keys and values can be turned into; no checkpoint stores them."""

LINE_ELEMENTS = 32
"""Keys and values are quantized in lines: a key channel over 32 tokens, or 32 channels of a token's values."""

PARAMETER_BYTES = 4
"""Scale and zero of a line."""

KV_LINE_BYTES = {"int8": LINE_ELEMENTS, "int4-g32": LINE_ELEMENTS // 2}
"""Bytes of a line's codes, by the formats of keys and values that are quantized."""

KV_FORMATS = ("fp32", "bf16", *KV_LINE_BYTES)
"""Formats of keys and values that the host attends to, the most exact first."""

QUALITY_BITS = {"exact": 16, "int8": 8, "int4": 4, "any": 4}
"""Fewest bits of an element that a quality class allows."""


def format_of(name: str) -> Format:
    """The format of a name.

    Raises:
        StatedError: it is not known.
    """
    found = FORMATS.get(name) or QUANTIZED.get(name)
    if found is None:
        raise StatedError(f"The storage format {name!r} is not known; known are {', '.join([*FORMATS, *QUANTIZED])}.")
    return found


@lru_cache(maxsize=4096)
def stored_bytes(shape: tuple[int, ...], format_name: str) -> int:
    """Bytes of a tensor of `shape` in a format.

    Raises:
        StatedError: the last dimension is not a whole number of blocks, or the format is unknown.
    """
    fmt = format_of(format_name)
    last = shape[-1] if shape else 1
    if last % fmt.block_elements:
        raise StatedError(f"A tensor of shape {list(shape)} is not a whole number of {format_name} blocks.")
    return prod(shape) // fmt.block_elements * fmt.block_bytes
