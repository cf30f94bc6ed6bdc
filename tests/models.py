"""Tiny random models of every family, saved as transformers saves them. Their weights are large enough that outputs differ clearly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "opt", "gpt_neox")
EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe")
VOCAB_SIZE = 128
HIDDEN_SIZE = 64
WINDOW = 6
"""Tokens of the sliding windows: shorter than the prompts of tests."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "initializer_range": 0.5,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 96}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {**_GROUPED, "head_dim": 32},
    "mistral": {**_GROUPED, "sliding_window": WINDOW, "head_dim": 16},
    "gemma2": {**_GROUPED, "sliding_window": WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3": {**_GROUPED, "sliding_window": WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {
        **_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "use_sliding_window": True,
        "sliding_window": WINDOW, "max_window_layers": 3,
    },
    "olmoe": {**_GROUPED, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 8.0},
    "granitemoe": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "phi3": {**_GROUPED, "original_max_position_embeddings": 256},
    "opt": {**_COMMON, "ffn_dim": 96, "init_std": 0.5, "dropout": 0.0},
    "gpt_neox": {**_COMMON, "intermediate_size": 96, "hidden_dropout": 0.0},
}


def tiny_model(
    family: str, num_layers: int = 4, dtype: str = "fp32", tied: bool | None = None, seed: int = 0,
    eos_token_id: int | Sequence[int] | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """A tiny random transformers model for causal language modelling, in evaluation mode.

    Args:
        family: one of FAMILIES or EXPERT_FAMILIES.
        dtype: "fp32", "bf16" or "fp16".
        tied: whether head and embedding are one; None: as the family has it.
        eos_token_id: None: no token ends a sequence.
        changes: fields of the configuration that replace those above; "layer_types" with "rope_parameters" and the like are possible.
    """
    import torch
    import transformers

    classes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        "phi3": ("Phi3Config", "Phi3ForCausalLM"),
        "opt": ("OPTConfig", "OPTForCausalLM"),
        "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
        "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
        "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
        "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    }
    config_class, model_class = (getattr(transformers, name) for name in classes[family])
    fields = {**_FIELDS[family], "num_hidden_layers": num_layers, "eos_token_id": eos_token_id, **changes}
    if family == "gemma3":
        fields.setdefault("layer_types", ["sliding_attention" if (i + 1) % 3 else "full_attention" for i in range(num_layers)])
    if isinstance(eos_token_id, Sequence):
        fields["eos_token_id"] = list(eos_token_id)
    if tied is not None:
        fields["tie_word_embeddings"] = tied
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = model_class(config_class(**fields))
        _randomize_vectors(model)
    finally:
        torch.random.set_rng_state(state)
    return model.to(getattr(torch, DTYPES[dtype])).eval()


def _randomize_vectors(model: Any) -> None:
    """Norms and biases start as ones and zeros, and a program that left them out would not be noticed."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def tiny_checkpoint(
    family: str, directory: Path, num_layers: int = 4, dtype: str = "fp32", tied: bool | None = None, sharded: bool = False,
    seed: int = 0, eos_token_id: int | Sequence[int] | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """Save a tiny random model with `save_pretrained`; see `tiny_model` for the arguments.

    Args:
        directory: folder that is written to (made if it is not there).
        sharded: several safetensors files with an index.

    Returns:
        The directory. It holds no tokenizer.
    """
    model = tiny_model(family, num_layers, dtype, tied, seed, eos_token_id, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size="100KB" if sharded else "5GB")
    return directory


GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


def tiny_gguf(
    family: str, path: Path, kind: str = "F32", num_layers: int = 4, tied: bool | None = None, seed: int = 0,
    metadata: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None, kinds: Mapping[str, str] | None = None,
    **changes: Any,
) -> Path:  # fmt: skip
    """Write a tiny random model as llama.cpp's converter would, without a tokenizer.

    Args:
        family: one of GGUF_FAMILIES.
        kind: GGUF type of the matrices: "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1" or another that `gguf.quants` can write; K-quants,
            which it cannot, hold random weights.
        kinds: other types of some matrices, by the part of a GGUF name that is not the layer's ("ffn_down").
        metadata: further metadata: a string or a positive whole number for each key.
        tensors: further fp32 tensors, by GGUF name.

    Returns:
        The path.
    """
    import gguf

    if family == "qwen2":
        changes = {"use_sliding_window": False, **changes}
    if family == "qwen3":
        changes = {"head_dim": 128, **changes}  # transformers' GGUF loader knows no other.
    model = tiny_model(family, num_layers, tied=tied, seed=seed, **changes)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, family.replace("_", ""))
    writer.add_name(f"tiny {family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if family in ("qwen3", "qwen3_moe"):
        writer.add_key_length(head_dim)
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "llama":
        writer.add_rope_dimension_count(head_dim)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, parameter in _gguf_parameters(model):
        data = parameter
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = _llama_cpp_permute(parameter, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        gguf_name = _gguf_name(name)
        chosen = (kinds or {}).get(gguf_name.split(".")[-2], kind)
        _add_tensor(writer, gguf_name, data, chosen if data.ndim > 1 else "F32")
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Names and values; experts' gate and up apart, as llama.cpp keeps them."""
    for name, parameter in model.named_parameters():
        data = parameter.detach().numpy()
        if name.endswith(".experts.gate_up_proj"):
            stem, half = name.removesuffix("gate_up_proj"), data.shape[1] // 2
            yield f"{stem}gate_proj.weight", data[:, :half].copy()
            yield f"{stem}up_proj.weight", data[:, half:].copy()
        else:
            yield (f"{name}.weight" if name.endswith(".experts.down_proj") else name), data


def _gguf_name(name: str) -> str:
    stem, part = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[module]}.{part}"
    return f"{_GGUF_NAMES[stem]}.{part}"


def _llama_cpp_permute(weights: Any, num_heads: int) -> Any:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    return weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _add_tensor(writer: Any, name: str, data: Any, kind: str) -> None:
    import gguf

    tensor_type = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        writer.add_tensor(name, _random_k_blocks(data.shape, kind.lower(), seed=len(writer.tensors[0])), raw_dtype=tensor_type)
        return
    writer.add_tensor(name, gguf.quants.quantize(data, tensor_type), raw_dtype=tensor_type)


def _random_k_blocks(shape: Sequence[int], format_name: str, seed: int) -> Any:
    """uint8 [rows, row bytes]: random blocks whose weights are of about the size that answers clearly."""
    import numpy as np

    from lmoffload.profiler.weights import SCALE_PLACES
    from lmoffload_solver.formats import FORMATS

    random, fmt, (places, size) = np.random.default_rng(seed), FORMATS[format_name], SCALE_PLACES[format_name]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // fmt.block_elements, fmt.block_bytes), np.uint8)
    for place in places:
        blocks[:, place : place + 2] = (size * random.uniform(3, 9, (len(blocks), 1))).astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)
