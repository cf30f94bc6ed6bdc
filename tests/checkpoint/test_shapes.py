"""Named shapes, dummies and inspection."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lmoffload.checkpoint import dummy as dummy_module
from lmoffload.checkpoint import inspect, load_tokenizer, make_dummy, named_configs, named_shape, open_checkpoint, transformers_config
from lmoffload.checkpoint.dummy import random_bf16
from lmoffload_solver.counting import weights_bytes
from lmoffload_solver.errors import StatedError, UsageError
from tests.models import tiny_checkpoint

PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-1.1b": 1_100_048_384,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "gemma-2-9b": 9_241_705_984,
    "phi-3-mini": 3_821_079_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
}
"""Parameter counts that the models' pages on the Hugging Face hub show."""


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_named_shapes_have_the_published_number_of_parameters(name: str) -> None:
    found = inspect(named_shape(name))
    assert found.num_parameters == PUBLISHED_PARAMETERS[name]
    assert found.weights_bytes == 2 * PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize(("name", "hidden"), [("opt-66b", 9216), ("opt-175b", 12288)])
def test_the_large_opt_shapes_by_their_formula(name: str, hidden: int) -> None:
    shape = named_shape(name)
    layer = 12 * hidden**2 + 13 * hidden
    assert inspect(shape).num_parameters == shape.num_layers * layer + (50272 + 2050) * hidden + 2 * hidden


def test_every_named_shape_is_a_shape_and_accepted_by_transformers(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    for name, config in named_configs().items():
        shape = named_shape(name)
        accepted = CONFIG_MAPPING[shape.model_type].from_dict(dict(config))
        assert accepted.num_hidden_layers == shape.num_layers
        assert shape.head.shape[0] == shape.vocab_size
        assert shape.embedding.shape[0] == shape.vocab_size


def test_names_that_are_not_known() -> None:
    assert named_shape(" OPT-30B ").num_layers == 48
    with pytest.raises(UsageError, match=r"no shape named 'llama-70b'; close ones are .*llama-2-70b"):
        named_shape("llama-70b")
    with pytest.raises(UsageError, match=r"those there are smollm2-135m, .*opt-175b"):
        named_shape("?")


def test_a_dummy_is_a_whole_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_dummy("smollm2-135m", tmp_path / "m", layers=1)
    checkpoint = open_checkpoint(path)
    assert checkpoint.shape.num_layers == 1
    assert checkpoint.shape.tied_head
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert sum(p.nbytes for p in model.parameters()) == weights_bytes(checkpoint.shape)
    tokenizer = load_tokenizer(checkpoint)
    for text in ("Hello  world\n", "안녕하세요 🎉", " lead"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == checkpoint.shape.vocab_size
    assert tokenizer.decode([49151]) == " w49151"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert transformers_config(checkpoint).eos_token_id == 2


@pytest.mark.parametrize("name", ["opt-350m", "qwen2.5-0.5b"])
def test_dummies_answer_differently_and_finitely(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = make_dummy(name, tmp_path / "m", layers=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [300, 6, 7, 8]])).logits[:, -1]
    assert torch.isfinite(logits).all()
    assert len(set(logits.argmax(-1).tolist())) == 3
    assert logits.std() > 1


def test_dummies_in_shards_and_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy_module, "SHARD_BYTES", 60_000_000)
    monkeypatch.setattr(dummy_module, "CHUNK_BYTES", 1_000_002)
    checkpoint = open_checkpoint(make_dummy("smollm2-135m", tmp_path / "a", layers=2, seed=3))
    assert [file.name for file in checkpoint.files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    same = open_checkpoint(make_dummy("smollm2-135m", tmp_path / "b", layers=2, seed=3))
    other = open_checkpoint(make_dummy("smollm2-135m", tmp_path / "c", layers=2, seed=4))
    assert checkpoint.fingerprint == same.fingerprint != other.fingerprint
    name = "model.layers.1.mlp.down_proj.weight"
    values = (checkpoint.read_array(name).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert 0.5 < values.std() / (2 / 1536**0.5) < 2
    assert abs(values.mean()) < values.std() / 100
    norm = checkpoint.read_array("model.layers.1.input_layernorm.weight").view(np.uint16)
    assert set(norm.tolist()) == {0x3F80}


def test_a_dummy_of_experts_stores_them_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    small = {**named_configs()["qwen3-30b-a3b"], "hidden_size": 128, "moe_intermediate_size": 32, "num_experts": 16, "vocab_size": 1024}
    monkeypatch.setattr(dummy_module, "named_config", lambda _: small)
    path = make_dummy("qwen3-30b-a3b", tmp_path / "m", layers=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    checkpoint = open_checkpoint(path)
    assert sum(p.nbytes for p in model.parameters()) == weights_bytes(checkpoint.shape)
    source = checkpoint.source("model.layers.1.mlp.experts.gate_up_proj")
    assert len(source.runs) == 2 * 16 and source.shape == (16, 64, 128)


def test_what_a_token_meets_of_named_shapes() -> None:
    """As published: Mixtral 12.9 of 46.7 billion parameters, Qwen3 3.3 of 30.5."""
    found = inspect(named_shape("mixtral-8x7b"))
    assert (found.num_experts, found.experts_per_token, found.expert_size, found.sparse_layers) == (8, 2, 14336, 32)
    assert found.class_bytes["experts"] == 2 * 32 * 8 * 3 * 4096 * 14336
    assert round(found.active_parameters / 1e9, 1) == 12.9
    assert round(inspect(named_shape("qwen3-30b-a3b")).active_parameters / 1e9, 2) == 3.35


@pytest.mark.parametrize("deviation", [1.0, 0.3, 0.0442, 0.0167])
def test_random_numbers_have_about_the_deviation_asked_for(deviation: float) -> None:
    bits = random_bf16(np.random.Generator(np.random.SFC64(0)), 1_000_003, deviation)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert 2**-0.51 < values.std() / deviation < 2**0.51
    assert abs(values.mean()) < 0.01 * deviation
    assert np.isfinite(values).all()


def test_dummies_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("x")
    with pytest.raises(StatedError, match="is not empty"):
        make_dummy("smollm2-135m", tmp_path / "full", layers=1)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["kept"]
    with pytest.raises(UsageError, match="at least 1 layer"):
        make_dummy("smollm2-135m", tmp_path / "a", layers=0)
    with pytest.raises(UsageError, match="no shape named"):
        make_dummy("nothing", tmp_path / "a")
    with pytest.raises(StatedError, match="cannot be written"):
        make_dummy("smollm2-135m", tmp_path / "full" / "kept" / "below", layers=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(StatedError, match=r"has 0\.0 GB free, and the dummy takes 349\.2 GB"):
        make_dummy("opt-175b", tmp_path / "b")
    assert not (tmp_path / "b" / "config.json").exists()


def test_inspection_by_hand(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("mistral", tmp_path / "m", num_layers=2, dtype="bf16"))
    found = inspect(checkpoint)
    attention, mlp = 2 * (64 * 64 * 2 + 32 * 64 * 2), 2 * 3 * 96 * 64
    assert found.class_bytes == {
        "embedding": 2 * 128 * 64,
        "attention": 2 * attention,
        "mlp": 2 * mlp,
        "norm": 2 * 5 * 64,
        "head": 2 * 128 * 64,
    }
    assert found.format_bytes == {"bf16": found.weights_bytes}
    assert found.weights_bytes == 2 * found.num_parameters == sum(found.class_bytes.values())
    assert found.layer_bytes == attention + mlp + 2 * 2 * 64
    assert found.kv_bytes_per_token == {"fp32": 2 * 2 * 32 * 4, "bf16": 2 * 2 * 32 * 2}
    assert found.windows == (6, 6)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 16)
    assert found.digest == checkpoint.fingerprint
    assert json.loads(found.model_dump_json())["num_layers"] == 2
