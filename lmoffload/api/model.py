"""Models as people name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmoffload.checkpoint import Checkpoint, named_shape, open_checkpoint
from lmoffload.errors import UsageError
from lmoffload_solver.model import ModelShape

SHAPE_PREFIX = "shape:"


@dataclass(frozen=True, slots=True)
class Model:
    """A model as named by the user: a checkpoint, or for planning alone a shape."""

    shape: ModelShape
    checkpoint: Checkpoint | None
    place: str
    """Where it is found again: an absolute path, or the name as given."""

    @property
    def digest(self) -> str:
        """What a plan for this model carries."""
        return self.shape.fingerprint() if self.checkpoint is None else self.checkpoint.fingerprint

    @property
    def path(self) -> Path | None:
        """Where the weights lie."""
        return None if self.checkpoint is None else self.checkpoint.path

    def require_checkpoint(self) -> Checkpoint:
        """Raises:
        UsageError: there are no weights to run.
        """
        if self.checkpoint is None:
            raise UsageError(f"{SHAPE_PREFIX}{self.shape.name} is a shape without weights: it can be planned, but not run.")
        return self.checkpoint


def open_model(name: str | Path) -> Model:
    """The model called `name`: a folder, a .gguf file, a hub id, or `shape:NAME`.

    Raises:
        StatedError: there is no such model, or its files are not sound.
    """
    if isinstance(name, str) and name.startswith(SHAPE_PREFIX):
        return Model(named_shape(name.removeprefix(SHAPE_PREFIX)), None, name)
    checkpoint = open_checkpoint(name)
    return Model(checkpoint.shape, checkpoint, str(checkpoint.path.absolute()))
