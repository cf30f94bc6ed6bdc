"""Where a model lies: a local path, or the local cache of the Hugging Face hub."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from lmoffload.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE, read_json_object
from lmoffload_solver.errors import StatedError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
CACHED_MODEL = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Configuration, weights, tokenizer; no other formats of the same weights."""
UNWANTED_FILES = ("*/*", "consolidated*")
"""Folders, and a second copy of the weights in their author's layout."""


def find_model(name: str | Path) -> Path:
    """The local folder or `.gguf` file of a model. No network call is made for a local path, nor for a hub id that is in the cache.

    Raises:
        StatedError: there is no such file, folder or hub model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise StatedError(f"The file {path} is not a model: give a folder in Hugging Face layout or a .gguf file.")
        return path
    if isinstance(name, Path) or not HUB_ID.fullmatch(name) or path.suffix.lower() == ".gguf":
        raise StatedError(f"There is no model at {name}: give a folder, a .gguf file or a hub id such as owner/name.")
    return _cached_or_downloaded(name)


def _folder(path: Path) -> Path:
    """A folder that holds nothing but one GGUF file stands for that file."""
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        if len(files) > 1:
            raise StatedError(f"The folder {path} holds {len(files)} .gguf files: name one of them, such as {files[0]}.")
        return files[0]
    return path


def name_of(place: Path) -> str:
    """The name of a model that `find_model` found: of its folder or file; owner/name in the cache of the hub."""
    place = place.absolute()
    if place.is_file():
        return place.stem
    cached = CACHED_MODEL.fullmatch(place.parent.parent.name)
    if cached and place.parent.name == "snapshots":
        return f"{cached['owner']}/{cached['name']}"
    return place.resolve().name


def _cached_or_downloaded(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError

    snapshot = partial(snapshot_download, hub_id, allow_patterns=list(WANTED_FILES), ignore_patterns=list(UNWANTED_FILES))
    cached: Path | None = None
    try:
        cached = Path(snapshot(local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        if HF_HUB_OFFLINE:
            raise StatedError(
                f"There is no folder {hub_id}, the hub model of that name is not in the local cache, and HF_HUB_OFFLINE is set."
            ) from None
    if cached is not None and (HF_HUB_OFFLINE or _has_weights(cached)):
        return cached
    try:
        return Path(snapshot())
    except Exception as error:  # The hub client passes on whatever its HTTP library raises.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise StatedError(f"There is no folder {hub_id}, and the hub model of that name could not be fetched: {reason}.") from error


def _has_weights(folder: Path) -> bool:
    """Whether a cached snapshot holds the files that its index names; other tools cache config.json alone, or stop half-way."""
    if (folder / SINGLE_FILE).exists():
        return True
    if not (folder / INDEX_FILE).exists():
        return False
    weight_map = read_json_object(folder / INDEX_FILE, "index").get("weight_map")
    return isinstance(weight_map, dict) and all((folder / str(shard)).exists() for shard in weight_map.values())
