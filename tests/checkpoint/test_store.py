"""The quantized store: exact bytes and sizes, resuming, staleness, one writer, room, small memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

from lmoffload.checkpoint import Checkpoint, open_checkpoint, open_store, prepare_store, store_bytes, with_formats
from lmoffload.checkpoint import store as store_module
from lmoffload.checkpoint.encode import can_hold
from lmoffload.checkpoint.manifest import MANIFEST_FILE, VERSION, Manifest, read_manifest
from lmoffload.checkpoint.store import append, store_folder
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.quantize import quantize
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED, stored_bytes
from tests.models import tiny_checkpoint, tiny_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "model", dtype="bf16", intermediate_size=128)


def bytes_of(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, np.ndarray]:
    with manifest.data_path.open("rb") as file:
        found = {}
        for tensor in manifest.tensors:
            file.seek(tensor.offset_bytes)
            found[tensor.name] = np.frombuffer(file.read(tensor.num_bytes), np.uint8)
    return found


def expected(checkpoint: Checkpoint, name: str, format_name: str) -> np.ndarray:
    tensor, source = checkpoint.shape.by_name[name], checkpoint.source(name)
    order = None if source.row_order is None else torch.from_numpy(np.ascontiguousarray(source.row_order))
    matrix = Matrix(torch.from_numpy(checkpoint.read_array(name)), source.format, tensor.shape[0], tensor.shape[1], order)
    return quantize(reference_widen(matrix), format_name).numpy()


def assert_holds(checkpoint: Checkpoint, manifest: Manifest, names: list[str]) -> None:
    found = bytes_of(checkpoint, manifest)
    assert set(found) >= set(names)
    for name in names:
        assert np.array_equal(found[name], expected(checkpoint, name, manifest.header.format)), name


def held(checkpoint: Checkpoint, format_name: str) -> list[str]:
    return [t.name for t in checkpoint.shape.tensors if can_hold(t, format_name)]


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_bytes_and_sizes_are_exact(folder, tmp_path, format_name, monkeypatch):
    monkeypatch.setattr("lmoffload.checkpoint.encode.CHUNK_ELEMENTS", 2048)  # several pieces a tensor
    checkpoint, seen = open_checkpoint(folder), []
    names = held(checkpoint, format_name)
    manifest = prepare_store(checkpoint, format_name, cache=tmp_path, on_progress=seen.append)
    assert [t.name for t in manifest.tensors] == names
    assert_holds(checkpoint, manifest, names)
    assert manifest.data_path.stat().st_size == store_bytes(checkpoint.shape, names, format_name) == seen[-1].total_bytes
    assert [p.done_bytes for p in seen] == sorted({p.done_bytes for p in seen}) and seen[-1].done_bytes == seen[-1].total_bytes
    assert all(t.offset_bytes % 4096 == 0 and t.num_bytes == stored_bytes(t.shape, format_name) for t in manifest.tensors)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_blocks_and_permuted_rows_of_gguf(tmp_path, kind):
    checkpoint = open_checkpoint(tiny_gguf("llama", tmp_path / "m.gguf", kind))
    assert any(checkpoint.source(name).row_order is not None for name in held(checkpoint, "int4-g32"))
    manifest = prepare_store(checkpoint, "int4-g32", cache=tmp_path)
    assert_holds(checkpoint, manifest, held(checkpoint, "int4-g32"))
    view = with_formats(checkpoint, dict.fromkeys(held(checkpoint, "int4-g32"), "int4-g32"), cache=tmp_path)
    assert all(view.source(name).row_order is None for name in held(checkpoint, "int4-g32"))


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4095, 4096, 4097, 1_048_577])
def test_any_number_of_bytes_comes_back(tmp_path, size):
    """W5: whatever the pieces, the bytes are the same and the file is whole pages; a longer leftover of a killed writer is cut off."""
    path, data = tmp_path / "data", np.random.default_rng(size).integers(0, 256, size, np.uint8)
    path.write_bytes(b"x" * 4096 + b"leftover" * 10**6)
    assert append(path, 4096, np.array_split(data, 3)) == size
    whole = path.read_bytes()
    assert whole[:4096] == b"x" * 4096 and whole[4096 : 4096 + size] == data.tobytes()
    assert len(whole) == 4096 + -(-size // 4096) * 4096 and not any(whole[4096 + size :])


def test_the_view_has_the_new_formats_and_reads_their_bytes(folder, tmp_path):
    checkpoint = open_checkpoint(folder)
    formats = {name: "int8" if ".mlp." in name else "int4-g64" for name in held(checkpoint, "int8") if ".layers.0." in name}
    view = with_formats(checkpoint, formats, cache=tmp_path)
    for tensor in view.shape.tensors:
        assert tensor.format == view.source(tensor.name).format == formats.get(tensor.name, "bf16")
        wanted = expected(checkpoint, tensor.name, tensor.format) if tensor.name in formats else checkpoint.read_array(tensor.name)
        assert np.array_equal(view.read_array(tensor.name), wanted)
        assert view.shape.by_name[tensor.name] == tensor
    assert {view.source(name).file for name in view.sources} <= set(view.files)
    assert with_formats(checkpoint, {}, cache=tmp_path) is checkpoint


def test_a_store_grows_by_what_is_asked(folder, tmp_path):
    checkpoint, seen = open_checkpoint(folder), []
    names = held(checkpoint, "int8")
    first = prepare_store(checkpoint, "int8", names[:3], cache=tmp_path)
    again = prepare_store(checkpoint, "int8", names[2:6], cache=tmp_path, on_progress=seen.append)
    assert [p.tensor for p in seen] == names[3:6] and again.tensors[:3] == first.tensors
    assert_holds(checkpoint, again, names[:6])
    assert open_store(checkpoint, "int8", names[:6], tmp_path) == again
    assert open_store(checkpoint, "int8", names, tmp_path) is None


def test_another_model_in_the_same_place(folder, tmp_path):
    """W1: each store is of its own model."""
    other = open_checkpoint(tiny_checkpoint("llama", tmp_path / "other", dtype="bf16", intermediate_size=128, seed=1))
    for checkpoint in (open_checkpoint(folder), other, open_checkpoint(folder)):
        assert_holds(checkpoint, prepare_store(checkpoint, "int8", cache=tmp_path), held(checkpoint, "int8"))


def test_weights_changed_in_place(folder, tmp_path):
    """W1: even where the fingerprint does not show it, the store is made anew, and a reader of the old one keeps its bytes."""
    checkpoint = open_checkpoint(folder)
    old = prepare_store(checkpoint, "int8", cache=tmp_path)
    reader = old.data_path.open("rb")
    before = bytes_of(checkpoint, old)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5] *= -2
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert open_store(checkpoint, "int8", held(checkpoint, "int8"), tmp_path) is None
    new = prepare_store(checkpoint, "int8", cache=tmp_path)
    assert_holds(checkpoint, new, held(checkpoint, "int8"))
    assert reader.read(64) == before[old.tensors[0].name][:64].tobytes() and not old.data_path.exists()
    assert len(list(new.folder.glob("weights-*"))) == 1


def test_a_touched_file_with_the_same_bytes_costs_no_new_store(folder, tmp_path):
    checkpoint, seen = open_checkpoint(folder), []
    old = prepare_store(checkpoint, "int8", cache=tmp_path)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    new = prepare_store(checkpoint, "int8", cache=tmp_path, on_progress=seen.append)
    assert not seen and new.tensors == old.tensors and new.header.sources != old.header.sources
    assert open_store(checkpoint, "int8", held(checkpoint, "int8"), tmp_path) == new


@pytest.mark.parametrize("damage", ["data cut short", "data gone", "line torn", "not JSON", "another version"])
def test_a_damaged_store_is_never_used(folder, tmp_path, damage):
    checkpoint = open_checkpoint(folder)
    names = held(checkpoint, "int8")
    manifest = prepare_store(checkpoint, "int8", cache=tmp_path)
    lines = manifest.folder / MANIFEST_FILE
    if damage == "data cut short":
        os.truncate(manifest.data_path, manifest.data_path.stat().st_size - 200)
    elif damage == "data gone":
        manifest.data_path.unlink()
    elif damage == "line torn":
        os.truncate(lines, lines.stat().st_size - 7)
    elif damage == "not JSON":
        lines.write_bytes(lines.read_bytes().replace(b'"name"', b'"nam\xff"', 1))
    else:
        lines.write_bytes(lines.read_bytes().replace(b'"version":%d' % VERSION, b'"version":0', 1))
    assert open_store(checkpoint, "int8", names, tmp_path) is None
    mended = prepare_store(checkpoint, "int8", cache=tmp_path)
    assert_holds(checkpoint, mended, names)
    assert read_manifest(mended.folder) == mended


def test_a_shard_cut_short_is_told(folder, tmp_path):
    """W4: file, expected and actual bytes."""
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 200)
    with pytest.raises(StatedError, match=r"model\.safetensors ends within the tensor .*: \d+ bytes .* where \d+ are expected"):
        prepare_store(checkpoint, "int8", cache=tmp_path)
    shutil.rmtree(folder)
    with pytest.raises(StatedError, match="cannot be written|cannot be read"):
        prepare_store(checkpoint, "int8", cache=tmp_path / "new")


def test_a_killed_process_leaves_what_it_has_written(tmp_path):
    """W4: kill -9 in the middle; the next one goes on from there and the bytes are right."""
    folder = tiny_checkpoint("llama", tmp_path / "model", dtype="bf16", num_layers=12, hidden_size=512, intermediate_size=1024)
    program = (
        "import sys, time; from pathlib import Path; from lmoffload.checkpoint import open_checkpoint, prepare_store\n"
        "prepare_store(open_checkpoint(sys.argv[1]), 'int4-g64', cache=Path(sys.argv[2]),"
        " on_progress=lambda p: (print(p.tensor, flush=True), time.sleep(0.02)))"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(folder), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(20):
        assert child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    checkpoint, seen = open_checkpoint(folder), []
    left = read_manifest(store_folder(checkpoint, "int4-g64", tmp_path))
    names = held(checkpoint, "int4-g64")
    assert left is not None and 20 <= len(left.tensors) < len(names)
    manifest = prepare_store(checkpoint, "int4-g64", cache=tmp_path, on_progress=seen.append)
    assert [p.tensor for p in seen] == names[len(left.tensors) :] and manifest.tensors[: len(left.tensors)] == left.tensors
    assert_holds(checkpoint, manifest, names)


def test_two_writers_at_once(folder, tmp_path):
    """W1: one writes, the other waits and writes nothing twice."""
    checkpoint, seen, failed = open_checkpoint(folder), [], []

    def work() -> None:
        try:
            prepare_store(checkpoint, "int8", cache=tmp_path, on_progress=lambda p: (seen.append(p.tensor), time.sleep(0.01)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = held(checkpoint, "int8")
    assert not failed and sorted(seen) == sorted(names)
    assert_holds(checkpoint, prepare_store(checkpoint, "int8", cache=tmp_path), names)


def test_room_is_checked_before_anything_is_written(folder, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(folder)
    needed = store_bytes(checkpoint.shape, held(checkpoint, "int8"), "int8")
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(StatedError, match=f"need {needed} bytes more in .* where {needed - 1} are free"):
        prepare_store(checkpoint, "int8", cache=tmp_path)
    manifest = read_manifest(store_folder(checkpoint, "int8", tmp_path))
    assert manifest is not None and not manifest.tensors and manifest.data_path.stat().st_size == 0


def test_weights_that_the_format_cannot_hold(folder, tmp_path):
    checkpoint = open_checkpoint(folder)
    with pytest.raises(StatedError, match=r"The tensor model\.norm\.weight of shape \[64\] cannot be stored as int8"):
        prepare_store(checkpoint, "int8", ["model.norm.weight"], cache=tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 3] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StatedError, match=r"model\.layers\.1\.mlp\.up_proj\.weight cannot be stored as int8: it holds .* finite"):
        prepare_store(open_checkpoint(folder), "int8", cache=tmp_path)


def test_memory_is_some_pieces_and_not_the_model(tmp_path):
    """W6: a checkpoint of 100 MB, its largest tensor 32 MB, is prepared within 60 MB beyond what the program itself takes."""
    folder = tiny_checkpoint(
        "llama", tmp_path / "model", dtype="bf16", num_layers=1, hidden_size=1024, intermediate_size=4096, vocab_size=16384,
        num_attention_heads=16, num_key_value_heads=16,
    )  # fmt: skip
    program = (
        "import resource, sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from lmoffload.checkpoint import open_checkpoint, prepare_store; from lmoffload.kernels.quantize import quantize\n"
        "quantize(torch.randn(16, 128), 'int4-g64'); peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "checkpoint, before = open_checkpoint(sys.argv[1]), peak()\n"
        "prepare_store(checkpoint, 'int4-g64', cache=Path(sys.argv[2])); print((peak() - before) * 1024)"
    )
    assert sum(path.stat().st_size for path in open_checkpoint(folder).files) > 100e6
    done = subprocess.run([sys.executable, "-c", program, str(folder), str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60e6
