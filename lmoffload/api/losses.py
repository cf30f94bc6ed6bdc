"""Where measured losses are kept: one file for each model in the user's data directory."""

from __future__ import annotations

from pathlib import Path

from lmoffload.checkpoint import read_importance, rounding_of
from lmoffload.documents import write_whole
from lmoffload.errors import StatedError
from lmoffload.settings import Settings
from lmoffload_solver.loss import LossTable
from lmoffload_solver.value import read_value


def losses_path(fingerprint: str) -> Path:
    """The file of a model's losses."""
    return Settings.of_user().data_directory / "losses" / f"{fingerprint}.json"


def save_losses(table: LossTable) -> Path:
    """Keep a table where later plans find it; returns its path.

    Raises:
        StatedError: it cannot be written there.
    """
    path = losses_path(table.model.digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StatedError(f"The measured losses cannot be written to {path}: {error.strerror or error}.") from error
    write_whole(path, table.model_dump_json(indent=2) + "\n", "table of losses")
    return path


def load_losses(fingerprint: str) -> LossTable | None:
    """What was measured of a model, or None where nothing was. What was measured of weights that would be rounded in another way now,
    because the calibration was lost or made anew, is left out.

    Raises:
        StatedError: the file is no table.
    """
    path = losses_path(fingerprint)
    if not path.exists():
        return None
    try:
        table = read_value(LossTable, path, "table of losses")
    except StatedError as error:
        raise StatedError(f"{str(error).rstrip('.')}; run `lmoffload quality` to measure this model anew.") from error
    importance = read_importance(fingerprint)
    true = tuple(loss for loss in table.losses if loss.rounding in (None, rounding_of(loss.format, importance)))
    return table.model_copy(update={"losses": true})
