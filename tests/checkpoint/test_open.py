"""Opening: in place, offline, read-only, without torch; the fingerprint says whether it is the same model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lmoffload.checkpoint import load_tokenizer, open_checkpoint
from lmoffload.checkpoint.dummy_tokenizer import write_tokenizer
from lmoffload_solver.errors import StatedError
from tests.models import VOCAB_SIZE, tiny_checkpoint, tiny_gguf

BLOCKED = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("a network call was made")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
from lmoffload.checkpoint import open_checkpoint, load_tokenizer, inspect
checkpoint = open_checkpoint(sys.argv[1])
inspect(checkpoint)
checkpoint.read_array(checkpoint.shape.embedding.name)
loaded = [name for name in ("torch", "transformers") if name in sys.modules]
assert not loaded, loaded
print(checkpoint.shape.name)
"""
BLOCKED_TOKENIZER = (
    BLOCKED
    + """
tokenizer = load_tokenizer(checkpoint)
print(tokenizer.decode(tokenizer("a b").input_ids))
"""
)


def hub_cache(model: Path, cache: Path) -> Path:
    """A model laid out as in a hub cache: a snapshot of symbolic links to blobs."""
    repository = cache / "models--someone--tiny"
    snapshot = repository / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for i, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, repository / "blobs" / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    return snapshot


def model_with_tokenizer(folder: Path) -> Path:
    path = tiny_checkpoint("llama", folder, vocab_size=300)
    write_tokenizer(path, 300)
    return path


def contents(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(file), file.lstat().st_size, file.lstat().st_mtime_ns) for file in folder.rglob("*"))


def test_a_read_only_hub_snapshot_without_network(tmp_path: Path) -> None:
    """Case D3; HF_HUB_OFFLINE is not set, so that nothing but the code keeps from calling."""
    snapshot = hub_cache(model_with_tokenizer(tmp_path / "m"), tmp_path / "cache")
    for folder in (snapshot, snapshot.parent, snapshot.parent.parent / "blobs"):
        folder.chmod(0o555)
    before = contents(tmp_path / "cache")
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_TOKENIZER, str(snapshot)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "someone/tiny\na b\n"
    assert contents(tmp_path / "cache") == before


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path) -> None:
    hub_cache(model_with_tokenizer(tmp_path / "m"), tmp_path / "cache")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache")}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", BLOCKED, "someone/tiny"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "someone/tiny\n"


def test_a_hub_id_that_is_not_cached_while_offline(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", BLOCKED, "someone/tiny"], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "There is no folder someone/tiny, the hub model of that name is not in the local cache, and HF_HUB_OFFLINE is set."
    )


def test_a_broken_link_is_a_missing_file(tmp_path: Path) -> None:
    snapshot = hub_cache(tiny_checkpoint("llama", tmp_path / "m", sharded=True), tmp_path / "cache")
    shard = sorted(snapshot.glob("*-00002-*"))[0]
    shard.resolve().unlink()
    with pytest.raises(StatedError, match=r"00002-of-\d+\.safetensors is missing \(incomplete download"):
        open_checkpoint(snapshot)


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    path = tiny_gguf("llama", tmp_path / "a.gguf", num_layers=1)
    assert open_checkpoint(tmp_path).path == path
    shutil.copy(path, tmp_path / "b.gguf")
    with pytest.raises(StatedError, match=r"holds 2 \.gguf files: name one of them"):
        open_checkpoint(tmp_path)


def test_fingerprints(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "a", sharded=True)
    fingerprint = open_checkpoint(model).fingerprint
    copied = tmp_path / "elsewhere" / "b"
    shutil.copytree(model, copied, copy_function=shutil.copyfile)
    assert open_checkpoint(copied).fingerprint == fingerprint
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"transformers_version": "1.0"}))
    assert open_checkpoint(copied).fingerprint == fingerprint
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    changed_config = open_checkpoint(copied).fingerprint
    other_weights = open_checkpoint(tiny_checkpoint("llama", tmp_path / "c", sharded=True, seed=1)).fingerprint
    other_format = open_checkpoint(tiny_checkpoint("llama", tmp_path / "d", sharded=True, dtype="bf16")).fingerprint
    assert len({fingerprint, changed_config, other_weights, other_format}) == 4


def test_weights_that_changed_in_place_change_the_fingerprint(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "a")
    before = open_checkpoint(path).fingerprint
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert open_checkpoint(path).fingerprint != before


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "a")
    checkpoint = open_checkpoint(path)
    last = max(checkpoint.sources, key=lambda name: checkpoint.source(name).offset_bytes)
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(checkpoint.source(last).offset_bytes + 1)
    with pytest.raises(StatedError, match="has changed since it was opened"):
        checkpoint.read_array(last)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StatedError, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(open_checkpoint(tiny_checkpoint("llama", tmp_path / "a")))
    (tmp_path / "a" / "tokenizer.json").write_text("{")
    with pytest.raises(StatedError, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(open_checkpoint(tmp_path / "a"))


def test_generation_config_is_read(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "a", eos_token_id=[3, 5])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5], "temperature": 0.6}))
    assert open_checkpoint(path).generation_config == {"eos_token_id": [3, 5], "temperature": 0.6}
    (path / "generation_config.json").unlink()
    assert open_checkpoint(path).generation_config is None
    (path / "generation_config.json").write_text("[]")
    with pytest.raises(StatedError, match=r"generation configuration .* is not a JSON object"):
        open_checkpoint(path)


def test_tiny_models_have_the_vocabulary_they_say(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", tmp_path / "a"))
    assert checkpoint.read_array("model.embed_tokens.weight").view(np.float32).size == VOCAB_SIZE * checkpoint.shape.hidden_size


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"eos_token_id": [[1]]}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "x"}, "repetition_penalty"),
        ({"do_sample": True, "temperature": "hot"}, "temperature"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature"),
        ({"do_sample": True, "top_p": 2}, "top_p"),
        ({"do_sample": True, "top_k": 1.5}, "top_k"),
        ({"do_sample": True, "min_p": 2}, "min_p"),
        ({"stop_strings": [3]}, "stop_strings"),
        ({"stop_strings": ["a", ""]}, "stop_strings"),
    ],
)
def test_generation_settings_without_meaning_are_named(tmp_path: Path, fields: dict[str, object], name: str) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "m", num_layers=1)
    (folder / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(StatedError, match=f"generation configuration of .* is not valid: {name} "):
        open_checkpoint(folder)


def test_generation_settings_that_are_not_applied_are_told(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "m", num_layers=1)
    applied = {
        "do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2], "num_beams": 1, "min_p": 0.3, "bad_words_ids": None,
        "stop_strings": "x",
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(applied), encoding="utf-8")
    assert open_checkpoint(folder).remarks == ()
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4, "suppress_tokens": [3]}), encoding="utf-8")
    (remark,) = open_checkpoint(folder).remarks
    assert "num_beams, suppress_tokens, which lmoffload does not apply" in remark
