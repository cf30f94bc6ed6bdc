"""A checkpoint whose weights are partly kept in stores: the same interface, other formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lmoffload.checkpoint.checkpoint import Checkpoint
from lmoffload.checkpoint.manifest import Manifest
from lmoffload.checkpoint.source import TensorSource
from lmoffload.checkpoint.store import StoreProgress, prepare_store


def with_formats(
    checkpoint: Checkpoint,
    formats: Mapping[str, str],
    *,
    cache: Path | None = None,
    on_progress: Callable[[StoreProgress], None] = lambda progress: None,
) -> Checkpoint:
    """The checkpoint with tensors in other formats, prepared now where they are not in their stores yet.

    Args:
        formats: a format for each tensor by name; tensors that are not named, or whose format is the one stored, are read in place.
        cache: where stores lie; the user's cache directory by default.

    Raises:
        StatedError: as `prepare_store` does.
    """
    wanted: dict[str, list[str]] = {}
    for tensor in checkpoint.shape.tensors:
        if formats.get(tensor.name, tensor.format) != tensor.format:
            wanted.setdefault(formats[tensor.name], []).append(tensor.name)
    if not wanted:
        return checkpoint
    manifests = [prepare_store(checkpoint, name, tensors, cache=cache, on_progress=on_progress) for name, tensors in wanted.items()]
    sources = dict(checkpoint.sources)
    for manifest in manifests:
        sources |= _sources(manifest, wanted[manifest.header.format])
    return replace(
        checkpoint,
        shape=checkpoint.shape.with_formats({name: source.format for name, source in sources.items()}),
        sources=sources,
        files=(*checkpoint.files, *(manifest.data_path for manifest in manifests)),
    )


def _sources(manifest: Manifest, names: list[str]) -> dict[str, TensorSource]:
    held = {tensor.name: tensor for tensor in manifest.tensors}
    return {
        name: TensorSource(manifest.data_path, held[name].offset_bytes, held[name].num_bytes, manifest.header.format, held[name].shape)
        for name in names
    }
