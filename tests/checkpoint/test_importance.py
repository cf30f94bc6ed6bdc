"""What columns count: kept beside the stores, which are rounded by it and never mixed with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lmoffload.checkpoint import Importance, open_checkpoint, open_store, prepare_store, read_importance, remove_store, write_importance
from lmoffload.checkpoint.importance import importance_path, rounding_of
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.quantize import quantize
from lmoffload_solver.errors import StatedError
from tests.models import tiny_checkpoint

NAME = "model.layers.1.mlp.up_proj.weight"


def importance(seed: int) -> Importance:
    return Importance({NAME: np.random.default_rng(seed).random(64, np.float32)}, f"text {seed}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "model", num_layers=2, intermediate_size=128)


def stored(checkpoint, cache, format_name):
    manifest = prepare_store(checkpoint, format_name, [NAME], cache=cache)
    tensor = manifest.tensors[-1]
    return manifest, torch.from_numpy(np.fromfile(manifest.data_path, np.uint8, tensor.num_bytes, offset=tensor.offset_bytes))


def test_it_comes_back(tmp_path):
    assert read_importance("f" * 32, tmp_path) is None
    write_importance(importance(0), "f" * 32, tmp_path)
    found = read_importance("f" * 32, tmp_path)
    assert found is not None and found.text == "text 0" and np.array_equal(found.squares[NAME], importance(0).squares[NAME])
    assert found.digest == importance(0).digest != importance(1).digest
    importance_path("f" * 32, tmp_path).write_bytes(b"torn")
    with pytest.raises(StatedError, match="The calibration .* cannot be read"):
        read_importance("f" * 32, tmp_path)


def test_a_store_is_rounded_by_it_and_made_anew_for_another(folder, tmp_path):
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.shape.by_name[NAME]
    wide = reference_widen(Matrix(torch.from_numpy(checkpoint.read_array(NAME)), tensor.format, *tensor.shape))
    for found in (None, importance(0), importance(1)):
        if found is not None:
            write_importance(found, checkpoint.fingerprint, tmp_path)
            assert open_store(checkpoint, "int4-g64", [NAME], tmp_path) is None, "the store is rounded in another way"
        squares = None if found is None else torch.from_numpy(found.squares[NAME])
        manifest, data = stored(checkpoint, tmp_path, "int4-g64")
        assert torch.equal(data, quantize(wide, "int4-g64", squares)) and len(manifest.tensors) == 1
        assert manifest.header.rounding == rounding_of("int4-g64", found)
        assert open_store(checkpoint, "int4-g64", [NAME], tmp_path) == manifest


def test_int8_stores_do_not_depend_on_it(folder, tmp_path):
    checkpoint = open_checkpoint(folder)
    before, _ = stored(checkpoint, tmp_path, "int8")
    write_importance(importance(0), checkpoint.fingerprint, tmp_path)
    after, _ = stored(checkpoint, tmp_path, "int8")
    assert after == before and after.header.rounding == "nearest"


def test_a_store_is_removed_and_made_again(folder, tmp_path):
    checkpoint = open_checkpoint(folder)
    manifest, data = stored(checkpoint, tmp_path, "int8")
    remove_store(checkpoint, "int8", tmp_path)
    assert not manifest.data_path.exists() and open_store(checkpoint, "int8", [], tmp_path) is None
    remove_store(checkpoint, "int8", tmp_path)
    remove_store(checkpoint, "int4-g64", tmp_path)
    assert torch.equal(stored(checkpoint, tmp_path, "int8")[1], data)
