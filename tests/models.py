"""Tiny random models of every family, saved as transformers saves them. Their weights are large enough that outputs differ clearly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "opt", "gpt_neox")
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

_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {**_GROUPED, "head_dim": 32},
    "mistral": {**_GROUPED, "sliding_window": WINDOW, "head_dim": 16},
    "gemma2": {**_GROUPED, "sliding_window": WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3": {**_GROUPED, "sliding_window": WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32},
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
        family: one of FAMILIES.
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
