"""Where a model lies: a local path, or the local cache of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from lmoffload_solver.errors import StatedError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Configuration, weights, tokenizer; no other formats of the same weights."""


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


def _cached_or_downloaded(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(WANTED_FILES), local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        pass
    if HF_HUB_OFFLINE:
        raise StatedError(f"There is no folder {hub_id}, the hub model of that name is not in the local cache, and HF_HUB_OFFLINE is set.")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(WANTED_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StatedError(f"There is no folder {hub_id}, and the hub model of that name could not be fetched: {reason}") from error
