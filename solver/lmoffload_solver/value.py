"""The base of every value that passes between parts: frozen, versioned, unknown fields rejected."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lmoffload_solver.errors import StatedError

Tier = Literal["device", "host", "disk"]
TensorClass = Literal["attention", "mlp", "experts", "embedding", "head", "norm"]
TaskClass = Literal["compute", "host_attention", "disk_io", "staging", "quantize"]
Resource = Literal[
    "disk_read", "disk_write", "upload", "download", "device", "host_compute", "host_attention"
]
Kind = Literal[
    "read_weights",
    "upload_weights",
    "dequantize_weights",
    "load_kv",
    "store_kv",
    "quantize_kv",
    "load_hidden",
    "store_hidden",
    "compute",
    "compute_before_attention",
    "compute_after_attention",
    "host_attention",
]
Quality = Literal["exact", "int8", "int4", "any"]
Goal = Literal["throughput", "latency", "deadline"]

V = TypeVar("V", bound="Value")


class Value(BaseModel):
    """A frozen value. Units stand in the field names: `_bytes`, `_s`, `_bytes_per_s`, `_flops`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def read_value(kind: type[V], path: Path, what: str) -> V:
    """Read a value from a JSON file.

    Raises:
        StatedError: the file is missing, unreadable, or not a valid `what`; one sentence naming the file and the field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise StatedError(f"The {what} {path} cannot be read: {reason}.") from error
    return parse_value(kind, text, f"{what} {path}")


def parse_value(kind: type[V], text: str | bytes, what: str) -> V:
    """Parse a value from JSON text; `what` names it in the error sentence."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first: dict[str, Any] = dict(error.errors()[0])
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        message = str(first["msg"]).rstrip(".")
        raise StatedError(f"The {what} is not valid: {place}: {message}.") from error
