"""Damaged and odd checkpoints: one sentence each, before anything is allocated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from lmoffload.checkpoint import Checkpoint, open_checkpoint
from lmoffload.checkpoint.families import FAMILIES as DESCRIBED
from lmoffload_solver.counting import class_bytes, weights_bytes
from lmoffload_solver.errors import StatedError
from tests.models import tiny_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def change_tensors(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def refusal(path: Path) -> str:
    with pytest.raises(StatedError) as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 1
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def opened(path: Path) -> Checkpoint | str:
    """The checkpoint, or what is said against it."""
    try:
        return open_checkpoint(path)
    except StatedError as error:
        return str(error)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "m")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "m", sharded=True)


def test_a_missing_shard(shards: Path) -> None:
    shard = sorted(shards.glob("model-00002-*"))[0]
    shard.unlink()
    assert refusal(shards) == f"The weight file {shard} is missing (incomplete download?)."


def test_a_key_missing_from_index_and_shard(shards: Path) -> None:
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    shard = shards / index["weight_map"].pop(Q_PROJ)
    tensors = load_file(shard)
    del tensors[Q_PROJ]
    save_file(tensors, shard, metadata={"format": "pt"})
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(shards) == f"The checkpoint {shards} lacks the tensor {Q_PROJ} (incomplete download?)."


def test_a_key_that_only_the_index_has(shards: Path) -> None:
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    shard = shards / index["weight_map"][Q_PROJ]
    tensors = load_file(shard)
    del tensors[Q_PROJ]
    save_file(tensors, shard, metadata={"format": "pt"})
    assert refusal(shards) == f"The weight file {shard} lacks the tensor {Q_PROJ} that the index names (incomplete download?)."


def test_a_shard_cut_short(shards: Path) -> None:
    shard = sorted(shards.glob("model-00002-*"))[0]
    whole = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(whole - 200)
    assert refusal(shards) == (
        f"The weight file {shard} is cut short: {whole} bytes expected, {whole - 200} bytes found (incomplete download?)."
    )


def test_an_index_that_points_outside(shards: Path) -> None:
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    for name in ("../secret.safetensors", "/etc/passwd", "..", ""):
        index["weight_map"][Q_PROJ] = name
        (shards / "model.safetensors.index.json").write_text(json.dumps(index))
        assert f"names the file {name!r} outside the folder" in refusal(shards)


def test_a_tensor_in_two_shards(shards: Path) -> None:
    first, second = sorted(shards.glob("model-0000[12]-*"))
    extra = next(iter(load_file(first).items()))
    save_file(load_file(second) | dict([extra]), second, metadata={"format": "pt"})
    assert refusal(shards) == f"The tensor {extra[0]} stands in two files, {first} and {second}."


def test_a_surplus_tensor_is_named(llama: Path) -> None:
    change_tensors(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)}))
    assert "stores the tensor model.layers.0.self_attn.q_norm.weight, which a llama model of this configuration does not use" in refusal(
        llama
    )


def test_a_layer_too_many_and_too_few(llama: Path) -> None:
    change_config(llama, num_hidden_layers=3)
    assert "stores the tensor model.layers.3." in refusal(llama)
    change_config(llama, num_hidden_layers=5)
    assert "lacks the tensor model.layers.4.self_attn.q_proj.weight and 8 more" in refusal(llama)


def test_recomputed_buffers_are_a_remark(llama: Path) -> None:
    change_tensors(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}))
    assert "not read" in open_checkpoint(llama).remarks[0]


def test_a_shape_against_the_configuration(llama: Path) -> None:
    change_config(llama, num_key_value_heads=4)
    assert "k_proj.weight with shape [32, 64], where its configuration asks for [64, 64]" in refusal(llama)


def test_types_that_do_not_run(llama: Path) -> None:
    change_tensors(llama, lambda tensors: tensors.update({Q_PROJ: np.zeros((64, 64), np.uint8)}))
    assert f"stores {Q_PROJ} as U8, which does not run" in refusal(llama)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "mamba"}, "model type 'mamba', which does not run; those that run are llama, mistral, qwen2, qwen3, gemma2"),
        ({"model_type": None}, "model type None"),
        ({"model_type": ["llama"]}, "does not run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq)"),
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number, not '64'"),
        ({"hidden_size": 0}, "hidden_size must be a positive whole number, not 0"),
        ({"hidden_size": True}, "hidden_size must be a positive whole number, not True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 10000"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3 key-value heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "hidden_size 64 is not a multiple of 5 attention heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_run(llama: Path, fields: dict[str, Any], said: str) -> None:
    change_config(llama, **fields)
    assert said in refusal(llama)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name the kind of each of the 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types holds 'linear_attention'"),
        ({"sliding_window": None}, "layer_types holds sliding_attention, but there is no sliding_window"),
        ({"use_bidirectional_attention": True}, "only causal models run"),
    ],
)
def test_attention_that_does_not_run(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = tiny_checkpoint("gemma3", tmp_path / "m")
    change_config(path, **fields)
    assert said in refusal(path)


def test_folders_without_what_is_needed(tmp_path: Path, llama: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "The configuration" in refusal(empty)
    (llama / "model.safetensors").rename(llama / "other.safetensors")
    assert "holds safetensors files but neither" in refusal(llama)
    (llama / "other.safetensors").rename(llama / "pytorch_model.bin")
    assert "pytorch_model*.bin only" in refusal(llama)
    (llama / "pytorch_model.bin").unlink()
    assert "holds no weights" in refusal(llama)
    for text in ("", "[]", "{", '{"a": ' * 100_000):
        (llama / "config.json").write_text(text)
        assert "JSON" in refusal(llama)


def test_not_a_model(tmp_path: Path) -> None:
    assert "There is no model at" in refusal(tmp_path / "nowhere")
    (tmp_path / "x.bin").write_bytes(b"x")
    assert "is not a model" in refusal(tmp_path / "x.bin")


def test_tied_head_is_the_embedding_once(tmp_path: Path) -> None:
    """Case W2."""
    checkpoint = open_checkpoint(tiny_checkpoint("llama", tmp_path / "m", tied=True))
    shape = checkpoint.shape
    assert shape.tied_head
    assert shape.head == shape.embedding
    assert "lm_head.weight" not in shape.by_name
    assert "head" not in class_bytes(shape)
    assert weights_bytes(shape) == sum(data.nbytes for data in load_file(tmp_path / "m" / "model.safetensors").values())


def test_a_stored_head_equal_to_the_tied_embedding_is_a_remark(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "m", tied=True)
    size = weights_bytes(open_checkpoint(path).shape)
    change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.shape.tied_head
    assert weights_bytes(checkpoint.shape) == size
    assert "the two are equal and read once" in checkpoint.remarks[0]


def test_a_stored_head_that_differs_from_the_tied_embedding_is_used_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint("llama", tmp_path / "m", tied=True)
    change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    checkpoint = open_checkpoint(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    assert not checkpoint.shape.tied_head
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.shape.head.name == "lm_head.weight"
    assert "differs" in checkpoint.remarks[0]


def test_only_the_head_of_a_tied_pair_is_stored(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "m", tied=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.shape.tied_head
    assert checkpoint.read_array("model.embed_tokens.weight").tobytes() == embedding.tobytes()


def test_an_untied_head_that_is_missing(llama: Path) -> None:
    change_tensors(llama, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks the tensor lm_head.weight (incomplete download?)" in refusal(llama)


FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings", "sliding_window", "layer_types", "use_sliding_window",
    "max_window_layers", "quantization_config", "use_bidirectional_attention",
)  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([*DESCRIBED, 64, 128, 4, 2]),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "x", None, []]), max_size=4),
    st.dictionaries(st.text(max_size=2), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_any_configuration_gives_a_model_or_a_stated_error(
    a_qwen2: Path, tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any_configuration"
    folder.mkdir(exist_ok=True)
    for file in a_qwen2.iterdir():
        shutil.copy(file, folder)
    change_config(folder, **fields)
    found = opened(folder)
    if isinstance(found, str):
        assert "\n" not in found
    else:
        assert set(found.sources) == set(found.shape.by_name)


@pytest.fixture(scope="module")
def a_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"), num_layers=1)


def test_a_configuration_nested_deep(llama: Path) -> None:
    for depth in (300, 900, 960, 990, 1100):
        config = json.loads((llama / "config.json").read_text())
        config.pop("nested", None)
        text = json.dumps(config)
        (llama / "config.json").write_text(text[:-1] + ', "nested": ' + "[" * depth + "]" * depth + "}")
        found = opened(llama)
        assert not isinstance(found, str) or "JSON" in found
        (llama / "config.json").write_text(text)
