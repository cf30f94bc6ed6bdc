"""Fingerprint of a model, so that a plan made for another one is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape

SAMPLE_BYTES = 64 * 2**10
"""Read from the start, the middle and the end of each weight file."""

FIELDS_THAT_DO_NOT_MATTER = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version"})


def fingerprint_of(config: Mapping[str, Any], shape: ModelShape, files: Sequence[Path]) -> str:
    """First 32 hex digits of a SHA-256 over configuration, tensors, file sizes and samples of the data; independent of where the model lies
    and of file times.

    Raises:
        StatedError: a file cannot be read.
    """
    fields = {key: value for key, value in config.items() if key not in FIELDS_THAT_DO_NOT_MATTER}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    digest.update(shape.model_copy(update={"name": ""}).model_dump_json().encode())
    for path in files:
        try:
            with path.open("rb") as file:
                num_bytes = file.seek(0, 2)
                digest.update(num_bytes.to_bytes(8, "little"))
                for start in (0, num_bytes // 2 - SAMPLE_BYTES // 2, num_bytes - SAMPLE_BYTES):
                    file.seek(max(0, start))
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise StatedError(f"The weight file {path} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()[:32]
