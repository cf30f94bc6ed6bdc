"""TensorSource: where one tensor lies on disk and how it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

STORED_FORMATS = ("fp32", "bf16", "fp16", "q8_0", "q4_0", "q4_1")
"""Formats of stored tensors that are read in place."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """One tensor in a file, read in place."""

    file: Path
    offset_bytes: int
    num_bytes: int
    format: str
    """A key of `lmoffload_solver.formats.FORMATS`, or the file's own name of a type that is not supported."""
    shape: tuple[int, ...]
    row_order: npt.NDArray[np.int64] | None = None
    """int64 [rows]: row j of the transformers parameter is stored as row `row_order[j]`; None when they are stored in order."""
