"""A folder in Hugging Face layout: config.json and safetensors files, one or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmoffload.checkpoint.safetensors_header import read_header
from lmoffload.checkpoint.source import TensorSource
from lmoffload_solver.errors import StatedError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds before it is matched with a model: configuration, tensors by stored name, files."""

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    tensors: Mapping[str, TensorSource]
    files: tuple[Path, ...]


def read_folder(folder: Path) -> Stored:
    """Read the configuration and the headers of the weight files.

    Raises:
        StatedError: config.json or weights are missing, unreadable or not valid; a shard or a tensor of the index is missing.
    """
    config = read_json_object(folder / "config.json", "configuration")
    generation_path = folder / "generation_config.json"
    generation_config = read_json_object(generation_path, "generation configuration") if generation_path.exists() else None
    if (folder / SINGLE_FILE).exists():
        path = folder / SINGLE_FILE
        return Stored(config, generation_config, read_header(path), (path,))
    if not (folder / INDEX_FILE).exists():
        raise StatedError(_no_weights(folder))
    tensors, files = _read_shards(folder)
    return Stored(config, generation_config, tensors, files)


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        StatedError: it is missing, too large, not UTF-8, not JSON or not an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise StatedError(f"The {what} {path} is larger than {MAX_JSON_BYTES} bytes.")
        document = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise StatedError(f"The {what} {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError):
        raise StatedError(f"The {what} {path} is not valid JSON.") from None
    if not isinstance(document, dict):
        raise StatedError(f"The {what} {path} is not a JSON object.")
    return document


def _no_weights(folder: Path) -> str:
    if next(folder.glob("pytorch_model*.bin"), None):
        return f"The folder {folder} holds weights as pytorch_model*.bin only, which do not run: save it again with safe_serialization."
    if next(folder.glob("*.safetensors"), None):
        return f"The folder {folder} holds safetensors files but neither {SINGLE_FILE} nor {INDEX_FILE} (incomplete download?)."
    return f"The folder {folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there (incomplete download?)."


def _read_shards(folder: Path) -> tuple[dict[str, TensorSource], tuple[Path, ...]]:
    index = folder / INDEX_FILE
    weight_map = read_json_object(index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise StatedError(f"The index {index} is not valid: weight_map must give a file for each tensor.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if shard != Path(shard).name or shard in ("", ".", "..") or "\0" in shard:
            raise StatedError(f"The index {index} is not valid: it names the file {shard!r:.80} outside the folder.")
        if not (folder / shard).exists():
            raise StatedError(f"The weight file {folder / shard} is missing (incomplete download?).")
    tensors: dict[str, TensorSource] = {}
    for shard in shards:
        for name, source in read_header(folder / shard).items():
            if name in tensors:
                raise StatedError(f"The tensor {name} stands in two files, {tensors[name].file} and {folder / shard}.")
            tensors[name] = source
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise StatedError(f"The weight file {folder / shard} lacks the tensor {name} that the index names (incomplete download?).")
    return tensors, tuple(folder / shard for shard in shards)
