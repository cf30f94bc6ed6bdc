"""Every family, held against transformers: names, shapes, bytes, values, defaults, windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lmoffload.checkpoint import Checkpoint, open_checkpoint, transformers_config
from lmoffload.checkpoint.families import FAMILIES as DESCRIBED
from lmoffload.checkpoint.geometry import geometry_of
from lmoffload_solver.counting import weights_bytes
from lmoffload_solver.errors import StatedError
from tests.models import EXPERT_FAMILIES, FAMILIES, tiny_checkpoint

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def as_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    source = checkpoint.source(name)
    return torch.from_numpy(checkpoint.read_array(name)).view(TORCH_DTYPES[source.format]).reshape(source.shape)


def agrees_with_transformers(path: Path) -> Checkpoint:
    """Names, shapes, values and bytes are those of the model that transformers loads; nothing is left over on either side."""
    checkpoint = open_checkpoint(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    parameters = dict(model.named_parameters())
    assert {t.name: t.shape for t in checkpoint.shape.tensors} == {name: tuple(p.shape) for name, p in parameters.items()}
    for name, parameter in parameters.items():
        assert torch.equal(as_tensor(checkpoint, name), parameter), name
    assert weights_bytes(checkpoint.shape) == sum(p.nbytes for p in parameters.values())
    assert weights_bytes(checkpoint.shape) == sum(source.num_bytes for source in checkpoint.sources.values())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert torch.equal(as_tensor(checkpoint, checkpoint.shape.embedding.name), embedding)
    assert torch.equal(as_tensor(checkpoint, checkpoint.shape.head.name), head)
    assert checkpoint.shape.tied_head == (embedding is head)
    return checkpoint


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_tiny_models(family: str, dtype: str, tmp_path: Path) -> None:
    agrees_with_transformers(tiny_checkpoint(family, tmp_path / family, dtype=dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_in_shards(family: str, tied: bool, tmp_path: Path) -> None:
    checkpoint = agrees_with_transformers(tiny_checkpoint(family, tmp_path / family, tied=tied, sharded=True))
    assert len(checkpoint.files) > 1
    assert checkpoint.shape.tied_head is tied


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts(family: str, tmp_path: Path) -> None:
    """Stored one by one, in files of several shards, and fused in the model."""
    checkpoint = agrees_with_transformers(tiny_checkpoint(family, tmp_path / family, dtype="bf16", sharded=True))
    fused = [t for t in checkpoint.shape.tensors if t.tensor_class == "experts"]
    assert {t.name.rpartition(".")[2]: len(t.shape) for t in fused} == {"gate_up_proj": 3, "down_proj": 3}
    assert all(len(checkpoint.source(t.name).runs) == t.num_runs for t in fused)
    assert (fused[0].num_runs > 1) == (family != "granitemoe")
    assert transformers_config(checkpoint).num_experts_per_tok == checkpoint.shape.experts_per_token


def test_an_expert_that_is_missing_or_stored_otherwise(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_checkpoint("mixtral", tmp_path / "m", num_layers=1)
    stored = load_file(path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    save_file({key: data for key, data in stored.items() if key != name}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StatedError, match=r"lacks the tensor model\.layers\.0\.mlp\.experts\.2\.w3\.weight"):
        open_checkpoint(path)
    save_file({**stored, name: stored[name].bfloat16()}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StatedError, match=r"experts\.2\.w3\.weight as bf16 .* other experts ask for fp32 with \[96, 64\]"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": None}),
        ("llama", {"head_dim": 32}),
        ("qwen3", {"attention_bias": True}),
        ("gemma2", {"attention_bias": True}),
        ("phi3", {"sliding_window": 5}),
        ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
        ("gpt_neox", {"attention_bias": False}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
def test_variants(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    agrees_with_transformers(tiny_checkpoint(family, tmp_path / family, **changes))


def test_classes_of_tensors(tmp_path: Path) -> None:
    """What streams are the matrices of layers, the embedding and the head; OPT's position table and projections stay in memory."""
    shape = open_checkpoint(tiny_checkpoint("opt", tmp_path / "m", 1, word_embed_proj_dim=32, do_layer_norm_before=False)).shape
    assert [(t.name.removeprefix("model.decoder."), t.tensor_class) for t in shape.tensors if t.is_matrix] == [
        ("embed_tokens.weight", "embedding"),
        ("layers.0.self_attn.q_proj.weight", "attention"),
        ("layers.0.self_attn.k_proj.weight", "attention"),
        ("layers.0.self_attn.v_proj.weight", "attention"),
        ("layers.0.self_attn.out_proj.weight", "attention"),
        ("layers.0.fc1.weight", "mlp"),
        ("layers.0.fc2.weight", "mlp"),
    ]
    resident = {t.name.removeprefix("model.decoder."): t.tensor_class for t in shape.tensors if not t.is_matrix and t.layer is None}
    assert resident == {"embed_positions.weight": "embedding", "project_in.weight": "embedding", "project_out.weight": "head"}
    assert shape.by_name["model.decoder.layers.0.fc1.bias"].tensor_class == "mlp"
    assert shape.by_name["model.decoder.layers.0.final_layer_norm.bias"].tensor_class == "norm"
    assert [t.layer for t in shape.tensors] == [None] * 3 + [0] * 16 + [None]


@pytest.mark.parametrize("family", DESCRIBED)
def test_defaults_are_those_of_the_configuration_class(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    described = DESCRIBED[family]
    raw = {name: field.default for name, field in type(config).__dataclass_fields__.items()}
    for name, default in described.defaults.items():
        if name in raw:
            assert raw[name] == default, name
        else:
            assert name in ("sliding_window_pattern", "head_dim"), name  # read with getattr or from kwargs by transformers


@pytest.mark.parametrize("family", DESCRIBED)
def test_an_empty_configuration_means_the_class_defaults(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    geometry = geometry_of(DESCRIBED[family], {"model_type": family}, "test", tied=config.tie_word_embeddings)
    assert geometry.sizes["hidden"] == config.hidden_size
    assert geometry.sizes["vocab"] == config.vocab_size
    assert len(geometry.layers) == config.num_hidden_layers
    assert geometry.layers[0].num_kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert [layer.window for layer in geometry.layers] == windows_of(config)


def windows_of(config: Any) -> list[int | None]:
    """What the attention modules of transformers do with a configuration."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None or config.model_type in ("mistral", "phi3", "mixtral", "qwen3_moe"):
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3, "num_hidden_layers": 5}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3, "num_hidden_layers": 5}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 16}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7}),
        ("gemma2", {"num_hidden_layers": 5}),
        ("gemma3_text", {"num_hidden_layers": 14}),
        ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 3}),
        ("phi3", {"sliding_window": 2047}),
        ("mixtral", {"sliding_window": 7}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5}),
    ],
)  # fmt: skip
def test_windows(family: str, fields: dict[str, Any]) -> None:
    geometry = geometry_of(DESCRIBED[family], {"model_type": family, **fields}, "test", tied=True)
    assert [layer.window for layer in geometry.layers] == windows_of(CONFIG_MAPPING[family].from_dict(dict(fields)))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_config_is_what_transformers_reads(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path / family)
    ours = transformers_config(open_checkpoint(path)).to_dict()
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype="auto").config.to_dict()
    assert {k: v for k, v in ours.items() if k != "_name_or_path"} == {k: v for k, v in theirs.items() if k != "_name_or_path"}


def test_base_models_and_older_names(tmp_path: Path) -> None:
    """A checkpoint of the bare base model leaves the prefix out; GPT-NeoX's head was once called embed_out."""
    from safetensors.numpy import load_file, save_file

    path = tiny_checkpoint("opt", tmp_path / "opt")
    renamed = {name.removeprefix("model."): data for name, data in load_file(path / "model.safetensors").items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    agrees_with_transformers(path)

    path = tiny_checkpoint("gpt_neox", tmp_path / "neox")
    stored = load_file(path / "model.safetensors")
    renamed = {name.replace("lm_head.", "embed_out."): data for name, data in stored.items()}
    renamed["gpt_neox.layers.0.attention.bias"] = np.zeros((1, 1, 8, 8), np.uint8)
    renamed["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    assert "embed_out.weight" in renamed
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = agrees_with_transformers(path)
    assert checkpoint.remarks == ("2 stored tensors are recomputed and not read, such as gpt_neox.layers.0.attention.bias",)
