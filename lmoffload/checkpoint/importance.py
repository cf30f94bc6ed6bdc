"""How much the columns of a model's matrices count: the mean square of what they are multiplied with, over a text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmoffload.settings import Settings
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED

FILE = "importance.safetensors"
NEAREST = "nearest"


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """Of one model on one text."""

    squares: Mapping[str, npt.NDArray[np.float32]]
    """fp32 [K] by the matrix's name, [.., N, K]; experts of a layer count together."""
    text: str
    """Name of the text."""

    @property
    def digest(self) -> str:
        """First 16 hex digits of a SHA-256 of the numbers."""
        digest = hashlib.sha256()
        for name in sorted(self.squares):
            digest.update(name.encode())
            digest.update(self.squares[name].tobytes())
        return digest.hexdigest()[:16]


def needs_importance(format_name: str) -> bool:
    """Whether weights in a format are rounded by what their columns count; int8 has no need of it."""
    return format_name in QUANTIZED and format_name != "int8"


def rounding_of(format_name: str, importance: Importance | None) -> str:
    """How weights are rounded to a format, as manifests and tables of losses say it."""
    return f"weighted-{importance.digest}" if importance is not None and needs_importance(format_name) else NEAREST


def importance_path(fingerprint: str, cache: Path | None = None) -> Path:
    """Beside the stores of a model, which it can be lost with. cache: the user's cache directory by default."""
    cache = Settings.of_user().cache_directory if cache is None else cache
    return cache / "weights" / fingerprint / FILE


def read_importance(fingerprint: str, cache: Path | None = None) -> Importance | None:
    """What a model was calibrated with; None where it was not.

    Raises:
        StatedError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = importance_path(fingerprint, cache)
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            return Importance({name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get("text", ""))  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StatedError(f"The calibration {path} cannot be read ({error}): delete it, or run `lmoffload quality` anew.") from error


def write_importance(importance: Importance, fingerprint: str, cache: Path | None = None) -> Path:
    """Keep it; stores of formats that are rounded by it are made anew when they are next asked for.

    Raises:
        StatedError: it cannot be written.
    """
    from safetensors.numpy import save_file

    path = importance_path(fingerprint, cache)
    draft = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(importance.squares), draft, {"text": importance.text})
        draft.replace(path)
    except OSError as error:
        raise StatedError(f"The calibration cannot be written to {path}: {error.strerror or error}.") from error
    return path
