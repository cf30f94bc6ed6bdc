"""Model families, described rather than programmed.

A family says, in transformers' parameter names, which tensors a decoder layer and the parts around the layers have, of which sizes, and
which defaults the transformers configuration class fills in where config.json leaves a field out (transformers 5.24,
`configuration_*.py`). The sizes that templates name are computed by `geometry.geometry_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from lmoffload_solver.value import TensorClass

Windows = Literal["none", "all_layers", "layer_types", "even_layers"]
"""Which layers have the configuration's window: none, all, those of `layer_types`; "even_layers": the same, where `layer_types` left out
means layers 0, 2, 4 and so on below `max_window_layers`."""


@dataclass(frozen=True, slots=True)
class Template:
    """One parameter: `{layer}` in its name stands for the layer's number, `dims` name sizes, `when` names flags that must all hold, of the
    model or of the layer ("sparse": its MLP is a choice of experts; else "dense")."""

    name: str
    dims: tuple[str, ...]
    tensor_class: TensorClass
    is_matrix: bool = False
    when: tuple[str, ...] = ()
    is_table: bool = False
    parts: tuple[str, ...] = ()
    """Stored tensors that each expert's matrix is made of, rows after rows, where checkpoints keep experts apart; `{expert}` is which."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`."""

    model_type: str
    causal_class: str
    prefix: str
    """What transformers puts before the names of the base model; a checkpoint of the bare base model leaves it out."""
    defaults: Mapping[str, Any]
    before: tuple[Template, ...]
    layer: tuple[Template, ...]
    after: tuple[Template, ...]
    windows: Windows = "none"
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Size name -> configuration field, where it differs from the common one."""
    renames: tuple[tuple[str, str], ...] = ()
    """(pattern in a stored name, what stands there in the parameter's)."""
    harmless: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    """Patterns of stored tensors that transformers recomputes, so that nothing consumes them."""

    @property
    def embedding(self) -> Template:
        """The token embedding table."""
        return next(t for t in self.before if t.tensor_class == "embedding" and t.is_matrix)


def _matrix(name: str, out_size: str, in_size: str, tensor_class: TensorClass, *, when: tuple[str, ...] = ()) -> Template:
    return Template(f"{name}.weight", (out_size, in_size), tensor_class, True, when)


def _linear(
    name: str, out_size: str, in_size: str, tensor_class: TensorClass, bias: str | bool, when: tuple[str, ...] = ()
) -> tuple[Template, ...]:
    """A linear layer; `bias` is True, False or the flag that switches it."""
    weight = _matrix(name, out_size, in_size, tensor_class, when=when)
    if bias is False:
        return (weight,)
    return weight, Template(f"{name}.bias", (out_size,), tensor_class, False, when if bias is True else (*when, bias))


def _rms_norm(name: str, size: str = "hidden") -> Template:
    return Template(f"{name}.weight", (size,), "norm")


def _layer_norm(name: str, when: tuple[str, ...] = ()) -> tuple[Template, ...]:
    return tuple(Template(f"{name}.{part}", ("hidden",), "norm", False, when) for part in ("weight", "bias"))


def _qkvo(layer: str, qkv_bias: str | bool, o_bias: str | bool, o_name: str = "o_proj") -> tuple[Template, ...]:
    return (
        *_linear(f"{layer}.self_attn.q_proj", "query", "hidden", "attention", qkv_bias),
        *_linear(f"{layer}.self_attn.k_proj", "key", "hidden", "attention", qkv_bias),
        *_linear(f"{layer}.self_attn.v_proj", "key", "hidden", "attention", qkv_bias),
        *_linear(f"{layer}.self_attn.{o_name}", "hidden", "query", "attention", o_bias),
    )


def _gated_mlp(
    layer: str, bias: str | bool = False, name: str = "mlp", size: str = "intermediate", when: tuple[str, ...] = ()
) -> tuple[Template, ...]:
    return (
        *_linear(f"{layer}.{name}.gate_proj", size, "hidden", "mlp", bias, when),
        *_linear(f"{layer}.{name}.up_proj", size, "hidden", "mlp", bias, when),
        *_linear(f"{layer}.{name}.down_proj", "hidden", size, "mlp", bias, when),
    )


def _experts(
    block: str, router: str = "gate", parts: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Template, ...]:
    """A router and the experts that it chooses from, as `transformers` fuses them: gate and up [E, 2·I, H], down [E, H, I].

    Args:
        parts: names of an expert's gate, up and down where checkpoints keep experts apart (transformers' `conversion_mapping.py`).
    """
    stored = tuple(f"{block}.experts.{{expert}}.{part}.weight" for part in parts or ())
    return (
        _matrix(f"{block}.{router}", "experts", "hidden", "mlp", when=("sparse",)),
        Template(f"{block}.experts.gate_up_proj", ("experts", "expert_gate_up", "hidden"), "experts", True, ("sparse",), parts=stored[:2]),
        Template(f"{block}.experts.down_proj", ("experts", "hidden", "expert"), "experts", True, ("sparse",), parts=stored[2:]),
    )


LAYER = "model.layers.{layer}"
QK_NORMS = (_rms_norm(f"{LAYER}.self_attn.q_norm", "head"), _rms_norm(f"{LAYER}.self_attn.k_norm", "head"))
TWO_NORMS = (_rms_norm(f"{LAYER}.input_layernorm"), _rms_norm(f"{LAYER}.post_attention_layernorm"))
FOUR_NORMS = (
    *TWO_NORMS,
    _rms_norm(f"{LAYER}.pre_feedforward_layernorm"),
    _rms_norm(f"{LAYER}.post_feedforward_layernorm"),
)
TOKENS = (_matrix("model.embed_tokens", "vocab", "hidden", "embedding"),)
FINAL_NORM = (_rms_norm("model.norm"),)
HEAD = _matrix("lm_head", "vocab", "hidden", "head", when=("untied",))

OPT_LAYER = "model.decoder.layers.{layer}"
NEOX_LAYER = "gpt_neox.layers.{layer}"


def _decoder(
    model_type: str, causal_class: str, layer: tuple[Template, ...], windows: Windows = "none", renames: tuple[tuple[str, str], ...] = (),
    **defaults: Any,
) -> Family:  # fmt: skip
    """A family of Llama's outline: model.embed_tokens, model.layers, model.norm, lm_head."""
    outline = TOKENS, layer, (*FINAL_NORM, HEAD)
    return Family(model_type, causal_class, "model.", MappingProxyType(defaults), *outline, windows, renames=renames)


LLAMA = _decoder(
    "llama", "LlamaForCausalLM", (*_qkvo(LAYER, "attention_bias", "attention_bias"), *_gated_mlp(LAYER, "mlp_bias"), *TWO_NORMS),
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=None,
    head_dim=None, max_position_embeddings=2048, tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
)  # fmt: skip
MISTRAL = _decoder(
    "mistral", "MistralForCausalLM", (*_qkvo(LAYER, False, False), *_gated_mlp(LAYER), *TWO_NORMS), "all_layers",
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=None, max_position_embeddings=131072, tie_word_embeddings=False, sliding_window=4096,
)  # fmt: skip
QWEN2 = _decoder(
    "qwen2", "Qwen2ForCausalLM", (*_qkvo(LAYER, True, False), *_gated_mlp(LAYER), *TWO_NORMS), "layer_types",
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    head_dim=None, max_position_embeddings=32768, tie_word_embeddings=False, use_sliding_window=False, sliding_window=4096,
    max_window_layers=28,
)  # fmt: skip
QWEN3 = _decoder(
    "qwen3", "Qwen3ForCausalLM",
    (*_qkvo(LAYER, "attention_bias", "attention_bias"), *QK_NORMS, *_gated_mlp(LAYER), *TWO_NORMS), "layer_types",
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    head_dim=128, max_position_embeddings=32768, tie_word_embeddings=False, attention_bias=False, use_sliding_window=False,
    sliding_window=4096, max_window_layers=28,
)  # fmt: skip
GEMMA2 = _decoder(
    "gemma2", "Gemma2ForCausalLM", (*_qkvo(LAYER, "attention_bias", "attention_bias"), *_gated_mlp(LAYER), *FOUR_NORMS), "layer_types",
    vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True, attention_bias=False, sliding_window=4096,
)  # fmt: skip
GEMMA3_TEXT = _decoder(
    "gemma3_text", "Gemma3ForCausalLM",
    (*_qkvo(LAYER, "attention_bias", "attention_bias"), *QK_NORMS, *_gated_mlp(LAYER), *FOUR_NORMS), "layer_types",
    vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, max_position_embeddings=131072, tie_word_embeddings=True, attention_bias=False, sliding_window=4096,
    sliding_window_pattern=6,
)  # fmt: skip
PHI3 = _decoder(
    "phi3", "Phi3ForCausalLM",
    (
        _matrix(f"{LAYER}.self_attn.qkv_proj", "query_key_value", "hidden", "attention"),
        _matrix(f"{LAYER}.self_attn.o_proj", "hidden", "query", "attention"),
        _matrix(f"{LAYER}.mlp.gate_up_proj", "gate_up", "hidden", "mlp"),
        _matrix(f"{LAYER}.mlp.down_proj", "hidden", "intermediate", "mlp"),
        *TWO_NORMS,
    ),
    "all_layers",
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=None,
    head_dim=None, max_position_embeddings=4096, tie_word_embeddings=False, sliding_window=None,
)  # fmt: skip
MIXTRAL = _decoder(
    "mixtral", "MixtralForCausalLM",
    (*_qkvo(LAYER, False, False), *_experts(f"{LAYER}.mlp", parts=("w1", "w3", "w2")), *TWO_NORMS), "all_layers",
    ((r"\.block_sparse_moe\.", ".mlp."),),
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=None, max_position_embeddings=131072, tie_word_embeddings=False, sliding_window=None, num_local_experts=8,
    num_experts_per_tok=2,
)  # fmt: skip
QWEN2_MOE = _decoder(
    "qwen2_moe", "Qwen2MoeForCausalLM",
    (
        *_qkvo(LAYER, "qkv_bias", False),
        *_gated_mlp(LAYER, when=("dense",)),
        *_gated_mlp(LAYER, name="mlp.shared_expert", size="shared", when=("sparse",)),
        *_experts(f"{LAYER}.mlp"),
        _matrix(f"{LAYER}.mlp.shared_expert_gate", "one", "hidden", "mlp", when=("sparse",)),
        *TWO_NORMS,
    ),
    "even_layers",
    vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
    head_dim=None, max_position_embeddings=32768, tie_word_embeddings=False, qkv_bias=True, use_sliding_window=False, sliding_window=4096,
    max_window_layers=28, decoder_sparse_step=1, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts_per_tok=4,
    num_experts=60, mlp_only_layers=None,
)  # fmt: skip
QWEN3_MOE = _decoder(
    "qwen3_moe", "Qwen3MoeForCausalLM",
    (
        *_qkvo(LAYER, "attention_bias", "attention_bias"), *QK_NORMS, *_gated_mlp(LAYER, when=("dense",)), *_experts(f"{LAYER}.mlp"),
        *TWO_NORMS,
    ),
    "all_layers",
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=4,
    head_dim=None, max_position_embeddings=32768, tie_word_embeddings=False, attention_bias=False, use_sliding_window=False,
    sliding_window=4096, decoder_sparse_step=1, moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, mlp_only_layers=None,
)  # fmt: skip
OLMOE = _decoder(
    "olmoe", "OlmoeForCausalLM",
    (
        *_qkvo(LAYER, "attention_bias", "attention_bias"), _rms_norm(f"{LAYER}.self_attn.q_norm", "query"),
        _rms_norm(f"{LAYER}.self_attn.k_norm", "key"), *_experts(f"{LAYER}.mlp"), *TWO_NORMS,
    ),
    vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=None,
    max_position_embeddings=4096, tie_word_embeddings=False, attention_bias=False, num_experts_per_tok=8, num_experts=64,
)  # fmt: skip
GRANITEMOE = _decoder(
    "granitemoe", "GraniteMoeForCausalLM",
    (
        *_qkvo(LAYER, "attention_bias", "attention_bias"), *_experts(f"{LAYER}.block_sparse_moe", "router", parts=None), *TWO_NORMS,
    ),
    renames=(
        (r"block_sparse_moe\.input_linear\.weight$", "block_sparse_moe.experts.gate_up_proj"),
        (r"block_sparse_moe\.output_linear\.weight$", "block_sparse_moe.experts.down_proj"),
        (r"block_sparse_moe\.router\.layer\.weight$", "block_sparse_moe.router.weight"),
    ),
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=None,
    head_dim=None, max_position_embeddings=2048, tie_word_embeddings=False, attention_bias=False, num_local_experts=8,
    num_experts_per_tok=2,
)  # fmt: skip
OPT = Family(
    "opt", "OPTForCausalLM", "model.",
    MappingProxyType({
        "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "max_position_embeddings": 2048, "word_embed_proj_dim": None, "tie_word_embeddings": True, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
    }),
    before=(
        _matrix("model.decoder.embed_tokens", "vocab", "word", "embedding"),
        Template("model.decoder.embed_positions.weight", ("learned_positions", "hidden"), "embedding", is_table=True),
        Template("model.decoder.project_in.weight", ("hidden", "word"), "embedding", False, ("projected",)),
    ),
    layer=(
        *_qkvo(OPT_LAYER, "enable_bias", "enable_bias", "out_proj"),
        *_layer_norm(f"{OPT_LAYER}.self_attn_layer_norm", ("layer_norm_elementwise_affine",)),
        *_linear(f"{OPT_LAYER}.fc1", "intermediate", "hidden", "mlp", "enable_bias"),
        *_linear(f"{OPT_LAYER}.fc2", "hidden", "intermediate", "mlp", "enable_bias"),
        *_layer_norm(f"{OPT_LAYER}.final_layer_norm", ("layer_norm_elementwise_affine",)),
    ),
    after=(
        *_layer_norm("model.decoder.final_layer_norm", ("final_norm", "layer_norm_elementwise_affine")),
        Template("model.decoder.project_out.weight", ("word", "hidden"), "head", False, ("projected",)),
        _matrix("lm_head", "vocab", "word", "head", when=("untied",)),
    ),
    fields=MappingProxyType({"intermediate_size": "ffn_dim"}),
)  # fmt: skip
GPT_NEOX = Family(
    "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.",
    MappingProxyType({
        "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "attention_bias": True,
    }),
    before=(_matrix("gpt_neox.embed_in", "vocab", "hidden", "embedding"),),
    layer=(
        *_linear(f"{NEOX_LAYER}.attention.query_key_value", "query_key_value", "hidden", "attention", "attention_bias"),
        *_linear(f"{NEOX_LAYER}.attention.dense", "hidden", "query", "attention", "attention_bias"),
        *_linear(f"{NEOX_LAYER}.mlp.dense_h_to_4h", "intermediate", "hidden", "mlp", True),
        *_linear(f"{NEOX_LAYER}.mlp.dense_4h_to_h", "hidden", "intermediate", "mlp", True),
        *_layer_norm(f"{NEOX_LAYER}.input_layernorm"),
        *_layer_norm(f"{NEOX_LAYER}.post_attention_layernorm"),
    ),
    after=(*_layer_norm("gpt_neox.final_layer_norm"), HEAD),
    renames=((r"^embed_out\.", "lm_head."),),
    harmless=(r"\.rotary_emb\.inv_freq$", r"\.attention\.(bias|masked_bias)$"),
)  # fmt: skip

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3_TEXT, PHI3, OPT, GPT_NEOX, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITEMOE)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in _ALL})
