"""Checkpoints written as GGUF: what is read back is what was there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lmoffload.bench.gguf_copy import write_gguf
from lmoffload.checkpoint import Checkpoint, open_checkpoint
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload_solver.errors import StatedError
from tests.models import tiny_checkpoint, tiny_gguf

FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps")


def weights(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor in fp32, rows in the parameter's order."""
    source = checkpoint.source(name)
    n, k = (*source.shape, 1)[:2]
    order = None if source.row_order is None else torch.from_numpy(source.row_order)
    return reference_widen(Matrix(torch.from_numpy(checkpoint.read_array(name)), source.format, n, k, order))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_bf16_copy_reads_back_as_it_was(family: str, tied: bool, tmp_path: Path) -> None:
    changes = {"use_sliding_window": False} if family == "qwen2" else {}
    original = open_checkpoint(tiny_checkpoint(family, tmp_path / "model", dtype="bf16", tied=tied, num_layers=2, **changes))
    write_gguf(original, tmp_path / "copy.gguf", "bf16")
    copy = open_checkpoint(tmp_path / "copy.gguf")
    assert {t.name for t in copy.shape.tensors} == {t.name for t in original.shape.tensors}
    assert copy.shape.layers == original.shape.layers
    assert all(copy.config[field] == pytest.approx(original.config[field]) for field in FIELDS)
    assert copy.config["rope_theta"] == original.config["rope_parameters"]["rope_theta"]
    for tensor in original.shape.tensors:
        assert torch.equal(weights(copy, tensor.name), weights(original, tensor.name)), tensor.name
        assert copy.source(tensor.name).format == ("bf16" if tensor.is_matrix else "fp32")


def test_q4_0_copy_is_within_half_a_step(tmp_path: Path) -> None:
    original = open_checkpoint(tiny_checkpoint("llama", tmp_path / "model", num_layers=1))
    write_gguf(original, tmp_path / "copy.gguf", "q4_0")
    copy = open_checkpoint(tmp_path / "copy.gguf")
    for tensor in original.shape.tensors:
        got, was = weights(copy, tensor.name), weights(original, tensor.name)
        if not tensor.is_matrix:
            assert torch.equal(got, was)
            continue
        assert copy.source(tensor.name).format == "q4_0"
        steps = was.view(-1, 32).abs().amax(1, keepdim=True) / 8  # the largest of 32 becomes -8, so 7 may be a step short
        assert ((got - was).view(-1, 32).abs() <= steps * 1.01).all()
        assert (got - was).view(-1, 32).abs().sub(steps / 2).le(steps / 100).float().mean() > 0.95


def test_q8_0_copy_is_within_half_a_step(tmp_path: Path) -> None:
    original = open_checkpoint(tiny_checkpoint("llama", tmp_path / "model", num_layers=1))
    write_gguf(original, tmp_path / "copy.gguf", "q8_0")
    copy = open_checkpoint(tmp_path / "copy.gguf")
    for tensor in original.shape.tensors:
        if tensor.is_matrix:
            got, was = weights(copy, tensor.name), weights(original, tensor.name)
            assert copy.source(tensor.name).format == "q8_0"
            assert ((got - was).view(-1, 32).abs() <= was.view(-1, 32).abs().amax(1, keepdim=True) / 127 * 0.51 + 1e-3).all()


def test_scaled_positions_of_llama_3(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    original = open_checkpoint(tiny_checkpoint("llama", tmp_path / "model", num_layers=1, rope_parameters=scaling))
    write_gguf(original, tmp_path / "copy.gguf", "bf16")
    read = open_checkpoint(tmp_path / "copy.gguf").config["rope_scaling"]
    assert {field: read[field] for field in read if field != "factor"} == {f: v for f, v in scaling.items() if f in read and f != "factor"}
    assert read["factor"] == pytest.approx(8.0)


def test_gguf_file_is_copied_too(tmp_path: Path) -> None:
    original = open_checkpoint(tiny_gguf("llama", tmp_path / "first.gguf", "Q8_0", num_layers=1))
    write_gguf(original, tmp_path / "copy.gguf", "bf16")
    copy = open_checkpoint(tmp_path / "copy.gguf")
    for tensor in original.shape.tensors:
        wanted = weights(original, tensor.name)
        np.testing.assert_array_equal(weights(copy, tensor.name), wanted.bfloat16().float() if tensor.is_matrix else wanted)


def test_other_architectures_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    original = open_checkpoint(tiny_checkpoint("opt", tmp_path / "model", num_layers=1))
    with pytest.raises(StatedError, match="opt are not written as GGUF"):
        write_gguf(original, tmp_path / "copy.gguf", "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
