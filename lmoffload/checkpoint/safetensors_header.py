"""The header of a safetensors file, read without loading a tensor.

The format (https://github.com/huggingface/safetensors#format): 8 bytes header length, little endian; the header, a JSON object of
name -> {dtype, shape, data_offsets}; the tensors' bytes, without holes. The `safetensors` package keeps offsets to itself, so the header
is parsed here, and as hostile input: every number is checked against the file before it is used.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from lmoffload.checkpoint.source import TensorSource
from lmoffload_solver.errors import StatedError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_DIMENSIONS = 8

FORMAT_OF_DTYPE = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
BYTES_OF_DTYPE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element; types below one byte are not among them."""


def read_header(path: Path) -> dict[str, TensorSource]:
    """The tensors of a safetensors file by stored name, in the order of their bytes.

    Raises:
        StatedError: the file is unreadable, cut short, longer than its header says, or the header is not valid.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            _check_start(path, start, file_bytes)
            header = file.read(header_bytes)
    except OSError as error:
        raise StatedError(f"The weight file {path} cannot be read: {error.strerror or error}.") from error
    entries = _parse_json(path, header)
    data_start = 8 + header_bytes
    sources = [_source(path, data_start, name, entry) for name, entry in entries.items() if name != "__metadata__"]
    sources.sort(key=lambda named: (named[1].offset_bytes, named[1].num_bytes))
    _check_tiling(path, data_start, file_bytes, sources)
    return dict(sources)


def _check_start(path: Path, start: bytes, file_bytes: int) -> None:
    if start == b"version ":
        raise StatedError(f"The weight file {path} is a Git LFS pointer, not the weights: fetch it with `git lfs pull`.")
    if len(start) < 8:
        raise StatedError(f"The weight file {path} is cut short: it has {file_bytes} bytes, less than a header (incomplete download?).")
    header_bytes = int.from_bytes(start, "little")
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise _invalid(path, f"its header would have {header_bytes} bytes")
    if 8 + header_bytes > file_bytes:
        raise StatedError(
            f"The weight file {path} is cut short: its header alone takes {8 + header_bytes} bytes, the file has {file_bytes} "
            "(incomplete download?)."
        )


def _invalid(path: Path, reason: str) -> StatedError:
    return StatedError(f"The weight file {path} is not a valid safetensors file: {reason}.")


def _parse_json(path: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice in its header")
        return found

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise _invalid(path, "its header is nested too deep") from None
    except UnicodeDecodeError:
        raise _invalid(path, "its header is not UTF-8 text") from None
    except json.JSONDecodeError:
        raise _invalid(path, "its header is not JSON") from None
    except ValueError as error:
        raise _invalid(path, str(error)) from None
    if not isinstance(entries, dict):
        raise _invalid(path, "its header is not a JSON object")
    return entries


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _source(path: Path, data_start: int, name: str, entry: object) -> tuple[str, TensorSource]:
    """One header entry, checked by itself."""
    if not isinstance(entry, dict):
        raise _invalid(path, f"tensor {name!r} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BYTES_OF_DTYPE:
        raise _invalid(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_count(size) for size in shape):
        raise _invalid(path, f"tensor {name!r} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets) or offsets[0] > offsets[1]:
        raise _invalid(path, f"tensor {name!r} has no valid data_offsets")
    num_bytes = offsets[1] - offsets[0]
    if prod(shape) * BYTES_OF_DTYPE[dtype] != num_bytes:
        raise _invalid(path, f"tensor {name!r} of shape {shape} and dtype {dtype} does not take the {num_bytes} bytes given for it")
    source = TensorSource(path, data_start + offsets[0], num_bytes, FORMAT_OF_DTYPE.get(dtype, dtype), tuple(shape))
    return name, source


def _check_tiling(path: Path, data_start: int, file_bytes: int, sources: list[tuple[str, TensorSource]]) -> None:
    """The tensors lie one after the other and fill the file."""
    position = data_start
    for name, source in sources:
        if source.offset_bytes != position:
            fault = "overlaps the tensor before it" if source.offset_bytes < position else "leaves a hole before it"
            raise _invalid(path, f"tensor {name!r} {fault}")
        position += source.num_bytes
    if position > file_bytes:
        raise StatedError(
            f"The weight file {path} is cut short: {position} bytes expected, {file_bytes} bytes found (incomplete download?)."
        )
    if position < file_bytes:
        raise _invalid(path, f"it has {file_bytes} bytes where its header accounts for {position}")
