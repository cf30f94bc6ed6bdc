"""Checkpoint: a model on disk, checked, its tensors read in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmoffload.checkpoint.assembly import assemble
from lmoffload.checkpoint.fingerprint import fingerprint_of
from lmoffload.checkpoint.generation import generation_remarks
from lmoffload.checkpoint.gguf_file import read_gguf
from lmoffload.checkpoint.hub import find_model, name_of
from lmoffload.checkpoint.huggingface import read_folder
from lmoffload.checkpoint.source import TensorSource, read_bytes
from lmoffload_solver.model import ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model on disk. Nothing of its weights is loaded."""

    path: Path
    """The folder, or the GGUF file."""
    shape: ModelShape
    config: Mapping[str, Any]
    """config.json, or the equivalent made from the metadata of a GGUF file."""
    generation_config: Mapping[str, Any] | None
    fingerprint: str
    """32 hex digits of the model itself: equal for a copy elsewhere, different for other weights."""
    files: tuple[Path, ...]
    """The weight files."""
    sources: Mapping[str, TensorSource]
    """Every tensor of `shape.tensors`, by name."""
    remarks: tuple[str, ...]
    """What is odd in the checkpoint but harmless."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix.lower() == ".gguf"

    def source(self, name: str) -> TensorSource:
        """Where a tensor lies. Raises KeyError for a name that is not in `shape.tensors`."""
        return self.sources[name]

    def read_array(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as stored, uint8 [num_bytes], rows in stored order.

        Raises:
            StatedError: the file cannot be read or has become shorter.
        """
        source = self.sources[name]
        return read_bytes(source, name, 0, source.num_bytes)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model: a folder in Hugging Face layout, a `.gguf` file, or the id of a model on the Hugging Face hub.

    Everything is checked here, from the headers alone: files, sizes, missing, surplus, misshapen and tied tensors. Imports neither torch
    nor transformers.

    Raises:
        StatedError: what is wrong, in one sentence.
    """
    place = find_model(path)
    is_file = place.is_file()
    stored = read_gguf(place) if is_file else read_folder(place)
    what = f"GGUF file {place}" if is_file else f"checkpoint {place}"
    assembly = assemble(name_of(place), stored.config, stored.tensors, what, f"configuration of the {what}")
    return Checkpoint(
        path=place,
        shape=assembly.shape,
        config={**stored.config, "tie_word_embeddings": assembly.shape.tied_head},
        generation_config=stored.generation_config,
        fingerprint=fingerprint_of(stored.config, assembly.shape, stored.files),
        files=stored.files,
        sources=assembly.sources,
        remarks=(*assembly.remarks, *generation_remarks(stored.generation_config, f"generation configuration of the {what}")),
    )
