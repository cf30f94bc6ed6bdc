"""A GGUF file as a checkpoint: its metadata made a transformers configuration, its tensors named as transformers names them.

Both follow transformers' own loader (`modeling_gguf_pytorch_utils.py`, `integrations/ggml.py` of 5.24), so that a file means here what it
means there. What that loader passes over in silence though it changes the result (scaled rotary positions) is understood where it is
Llama 3's scaling, and else refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lmoffload.checkpoint.gguf_header import GgufHeader, Metadata, read_gguf_header
from lmoffload.checkpoint.huggingface import Stored
from lmoffload.checkpoint.source import TensorSource, read_bytes
from lmoffload_solver.errors import StatedError

COMMON_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "embedding_length": "hidden_size",
        "rope.freq_base": "rope_theta",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "vocab_size": "vocab_size",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
)
TOKENIZER_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer.ggml.bos_token_id": "bos_token_id",
        "tokenizer.ggml.eos_token_id": "eos_token_id",
        "tokenizer.ggml.unknown_token_id": "unk_token_id",
        "tokenizer.ggml.padding_token_id": "pad_token_id",
    }
)
OUTER_NAMES: Mapping[str, str] = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
EXPERT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
        "ffn_up_exps": "mlp.experts.{expert}.up_proj",
        "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    }
)
"""Tensors [experts, N, K], taken apart as folders in Hugging Face layout store them."""

MAX_EXPERTS = 4096


ROPE_FACTORS = "rope_freqs.weight"
LLAMA3: Mapping[str, Any] = MappingProxyType({"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
"""Of Llama 3.1, 3.2 and 3.3; only their factor differs."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one `general.architecture` of GGUF becomes a transformers model."""

    model_type: str
    head_dim_field: str | None
    """Metadata field of the head size, where the configuration has one."""
    permuted: bool
    """Rows of q and k are stored with the two halves of each head interleaved (llama.cpp's rotary layout)."""
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of the configuration that llama.cpp has in its code and not in the file."""


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", "rope.dimension_count", permuted=True),
        "qwen2": Architecture("qwen2", None, permuted=False),
        "qwen3": Architecture("qwen3", "attention.key_length", permuted=False),
        "qwen3moe": Architecture("qwen3_moe", "attention.key_length", permuted=False, fixed={"norm_topk_prob": True}),
    }
)


def read_gguf(path: Path) -> Stored:
    """Read a GGUF file.

    Raises:
        StatedError: the file is not valid, or its architecture does not run, or uses what does not run.
    """
    header = read_gguf_header(path)
    name = header.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise StatedError(
            f"The GGUF file {path} is of the architecture {name!r:.40}, which does not run from GGUF; those that do are "
            f"{', '.join(ARCHITECTURES)}."
        )
    _check_features(path, str(name), header)
    config = config_of(str(name), header)
    if ROPE_FACTORS in header.tensors:
        config["rope_scaling"] = llama3_scaling(path, header.tensors[ROPE_FACTORS], config)
    named = {parameter_name(tensor): source for tensor, source in header.tensors.items() if tensor != ROPE_FACTORS}
    tensors = {name: part for tensor, source in named.items() for name, part in _apart(tensor, source, config.get("num_experts"))}
    if architecture.permuted:
        tensors = {tensor: _with_row_order(tensor, source, config) for tensor, source in tensors.items()}
    generation_config: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return Stored(config, generation_config, tensors, (path,))


def _check_features(path: Path, architecture: str, header: GgufHeader) -> None:
    split = header.metadata.get("split.count", 0)
    if isinstance(split, int) and split > 1:
        raise StatedError(f"The GGUF file {path} is one of {split} parts: join them with llama-gguf-split --merge.")
    scaling = _position_scaling(architecture, header)
    if scaling is not None:
        raise StatedError(
            f"The GGUF file {path} scales rotary positions ({scaling}), which does not run from GGUF: take the original folder."
        )
    experts = header.metadata.get(f"{architecture}.expert_count", 0)
    if experts and architecture != "qwen3moe":
        raise StatedError(f"The GGUF file {path} is a mixture of {experts} experts, which does not run from GGUF for {architecture}.")


def _position_scaling(architecture: str, header: GgufHeader) -> str | None:
    """What says that rotary positions are scaled. llama.cpp takes a factor without a type as linear scaling."""
    kind = header.metadata.get(f"{architecture}.rope.scaling.type")
    if kind not in (None, "none"):
        return str(kind)
    if kind is None:
        for field in ("rope.scaling.factor", "rope.scale_linear"):
            if header.metadata.get(f"{architecture}.{field}", 1) not in (0, 1):
                return field
    return None


def llama3_scaling(path: Path, source: TensorSource, config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' `rope_scaling` of the factors by which a file divides the rotary frequencies: Llama 3's, recognized by its factors,
    which llama.cpp's convert_hf_to_gguf.py computes from the configuration.

    Raises:
        StatedError: they are others.
    """
    found = read_bytes(source, ROPE_FACTORS, 0, source.num_bytes).view(np.float32) if source.format == "fp32" else np.empty(0)
    head_dim, theta = config.get("head_dim"), config.get("rope_theta", 10000.0)
    if isinstance(head_dim, int) and found.size == head_dim // 2 and np.isfinite(found).all():
        factor = float(found.max())
        if np.allclose(found, llama3_factors(head_dim, theta, factor), rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise StatedError(
        f"The GGUF file {path} scales rotary positions ({ROPE_FACTORS}) in another way than Llama 3 does, which does not run from GGUF: "
        "take the original folder."
    )


def llama3_factors(head_dim: int, theta: float, factor: float) -> npt.NDArray[np.float64]:
    """float64 [head_dim / 2]: by what Llama 3's scaling divides the rotary frequencies."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    rounds = LLAMA3["original_max_position_embeddings"] / wavelengths
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((rounds - low) / (high - low), 0, 1)
    scaled: npt.NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return scaled


def config_of(architecture: str, header: GgufHeader) -> dict[str, Any]:
    """The configuration that transformers makes of the metadata of a GGUF file."""
    metadata: Metadata = header.metadata
    described = ARCHITECTURES[architecture]
    tied = "output.weight" not in header.tensors
    config: dict[str, Any] = {"model_type": described.model_type, **described.fixed, "tie_word_embeddings": tied}
    fields = {f"{architecture}.{field}": name for field, name in COMMON_FIELDS.items()} | dict(TOKENIZER_FIELDS)
    if described.head_dim_field:
        fields[f"{architecture}.{described.head_dim_field}"] = "head_dim"
    for key, name in fields.items():
        if key in metadata:
            config[name] = metadata[key]
    if "vocab_size" not in config:
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        config["vocab_size"] = metadata.get("tokenizer.ggml.tokens.length", len(tokens) if isinstance(tokens, list) else None)
    return config


def parameter_name(gguf_name: str) -> str:
    """transformers' name of a GGUF tensor; a name that is not known is kept, and then found to be surplus."""
    stem, _, part = gguf_name.rpartition(".")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{part}"
    pieces = stem.split(".")
    if len(pieces) == 3 and pieces[0] == "blk" and pieces[1].isdecimal() and pieces[2] in LAYER_NAMES:
        return f"model.layers.{int(pieces[1])}.{LAYER_NAMES[pieces[2]]}.{part}"
    return gguf_name


def _apart(name: str, source: TensorSource, num_experts: object) -> list[tuple[str, TensorSource]]:
    """A tensor of all experts as one for each; any other as it is."""
    pieces = name.split(".")
    known = len(pieces) == 4 and pieces[0] == "blk" and pieces[1].isdecimal() and pieces[2] in EXPERT_NAMES
    if not known or len(source.shape) != 3 or source.shape[0] != num_experts or source.shape[0] > MAX_EXPERTS:
        return [(name, source)]
    size, stem = source.num_bytes // source.shape[0], f"model.layers.{int(pieces[1])}.{EXPERT_NAMES[pieces[2]]}.{pieces[3]}"
    return [
        (
            stem.format(expert=expert),
            replace(source, offset_bytes=source.offset_bytes + expert * size, num_bytes=size, shape=source.shape[1:]),
        )
        for expert in range(source.shape[0])
    ]


def _with_row_order(name: str, source: TensorSource, config: Mapping[str, Any]) -> TensorSource:
    heads_field = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads" if ".k_proj." in name else None
    if heads_field is None or not source.shape:
        return source
    num_heads = config.get(heads_field, config.get("num_attention_heads"))
    if not isinstance(num_heads, int) or num_heads <= 0 or source.shape[0] % (2 * num_heads):
        return source  # The configuration does not fit the tensor: the check of shapes says so.
    return replace(source, row_order=rotary_row_order(source.shape[0], num_heads))


def rotary_row_order(num_rows: int, num_heads: int) -> npt.NDArray[np.int64]:
    """int64 [num_rows]: the stored row of each row of transformers' q or k weight.

    llama.cpp stores each head's rows as pairs (i, i + head_dim / 2), so that rotary pairs are neighbours (`permute` in its
    convert_hf_to_gguf.py); transformers undoes it in `LlamaTensorProcessor._reverse_permute_weights`.
    """
    return np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_rows)
