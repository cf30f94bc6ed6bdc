"""Geometry: the sizes, flags and attention windows that a configuration gives a model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmoffload.checkpoint.families import FAMILIES, Family
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import LayerShape

LARGEST_SIZE = 2**31
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Geometry:
    """What templates are filled with."""

    sizes: Mapping[str, int]
    flags: frozenset[str]
    layers: tuple[LayerShape, ...]
    sparse: tuple[bool, ...]
    """Of each layer, whether its MLP is a choice of experts."""
    experts_per_token: int
    """Of a sparse layer; 0 where there is none."""
    max_positions: int

    def flags_of(self, layer: int | None) -> frozenset[str]:
        """Flags of a layer, or of what lies around the layers."""
        return self.flags if layer is None else self.flags | {"sparse" if self.sparse[layer] else "dense"}


class ConfigReader:
    """Reads fields of a configuration, with the family's defaults, and refuses what is not of the right kind."""

    def __init__(self, family: Family, config: Mapping[str, Any], what: str) -> None:
        self.family = family
        self.config = config
        self.what = what

    def error(self, reason: str) -> StatedError:
        return StatedError(f"The {self.what} is not valid: {reason}.")

    def value(self, name: str) -> Any:
        """The field, or the default of the configuration class where it is absent."""
        name = self.family.fields.get(name, name)
        return self.config.get(name, self.family.defaults.get(name))

    def size(self, name: str, otherwise: int | None = None) -> int:
        """A positive whole number; `otherwise` stands for null where the configuration class derives the field."""
        value = self.value(name)
        if value is None and otherwise is not None:
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < LARGEST_SIZE:
            raise self.error(f"{self.family.fields.get(name, name)} must be a positive whole number, not {value!r:.40}")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r:.40}")
        return value


def family_of(config: Mapping[str, Any], what: str) -> Family:
    """The family of a configuration.

    Raises:
        StatedError: the model type is missing or does not run, naming those that do; or the weights are quantized in a way that does not.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise StatedError(
            f"The {what} is of the model type {model_type!r:.40}, which does not run; those that run are {', '.join(FAMILIES)}."
        )
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise StatedError(
            f"The {what} says that the weights are quantized ({method or 'unknown method'}), which does not run: "
            "take the unquantized checkpoint, or a GGUF file."
        )
    return family


def geometry_of(family: Family, config: Mapping[str, Any], what: str, *, tied: bool) -> Geometry:
    """Sizes, flags and layers of a model.

    Args:
        what: names the configuration in error sentences, e.g. "config.json of X".
        tied: the output head is the embedding table.

    Raises:
        StatedError: a field is not of its kind, or the fields contradict each other.
    """
    read = ConfigReader(family, config, what)
    hidden = read.size("hidden_size")
    num_heads = read.size("num_attention_heads")
    num_kv_heads = read.size("num_key_value_heads", num_heads) if "num_key_value_heads" in family.defaults else num_heads
    if num_heads % num_kv_heads:
        raise read.error(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    fixed_head = "head_dim" not in family.defaults
    if hidden % num_heads and (fixed_head or read.value("head_dim") is None):
        raise read.error(f"hidden_size {hidden} is not a multiple of {num_heads} attention heads")
    head = hidden // num_heads if fixed_head else read.size("head_dim", hidden // num_heads)
    num_layers = read.size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise read.error(f"num_hidden_layers is {num_layers}, more than {MAX_LAYERS}")
    intermediate = read.size("intermediate_size")
    word = read.size("word_embed_proj_dim", hidden) if "word_embed_proj_dim" in family.defaults else hidden
    max_positions = read.size("max_position_embeddings")
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "vocab": read.size("vocab_size"),
        "head": head,
        "query": num_heads * head,
        "key": num_kv_heads * head,
        "query_key_value": (num_heads + 2 * num_kv_heads) * head,
        "gate_up": 2 * intermediate,
        "word": word,
        # OPTLearnedPositionalEmbedding keeps two rows for padding before position 0.
        "learned_positions": max_positions + 2,
        "one": 1,
    }
    sparse = sparse_layers(read, num_layers)
    per_token = 0
    if any(sparse):
        sizes |= _expert_sizes(read, intermediate)
        per_token = read.size("num_experts_per_tok")
        if per_token > sizes["experts"]:
            raise read.error(f"num_experts_per_tok is {per_token}, and there are {sizes['experts']} experts")
    layers = tuple(
        LayerShape(num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=head, value_dim=head, window=window)
        for window in windows_of(read, num_layers)
    )
    return Geometry(sizes, _flags(read, tied=tied, projected=word != hidden), layers, sparse, per_token, max_positions)


def sparse_layers(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts: where the family has any, all but `mlp_only_layers`, or of those every `decoder_sparse_step`-th."""
    defaults = read.family.defaults
    if "num_experts_per_tok" not in defaults:
        return (False,) * num_layers
    step = read.size("decoder_sparse_step") if "decoder_sparse_step" in defaults else 1
    dense = read.value("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)) or not all(isinstance(layer, int) for layer in dense):
        raise read.error("mlp_only_layers must be a list of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _expert_sizes(read: ConfigReader, intermediate: int) -> dict[str, int]:
    names = ("num_local_experts", "num_experts")  # transformers takes either, and saves one family's under the other's name
    given = [name for name in names if name in read.config] or [name for name in names if name in read.family.defaults]
    expert = read.size("moe_intermediate_size") if "moe_intermediate_size" in read.family.defaults else intermediate
    sizes = {"experts": read.size(given[0]), "expert": expert, "expert_gate_up": 2 * expert}
    if "shared_expert_intermediate_size" in read.family.defaults:
        sizes["shared"] = read.size("shared_expert_intermediate_size")
    return sizes


def _flags(read: ConfigReader, *, tied: bool, projected: bool) -> frozenset[str]:
    names = ("attention_bias", "qkv_bias", "mlp_bias", "enable_bias", "layer_norm_elementwise_affine")
    flags = {name for name in names if name in read.family.defaults and read.flag(name)}
    if "do_layer_norm_before" in read.family.defaults and read.flag("do_layer_norm_before") and not read.flag("_remove_final_layer_norm"):
        flags.add("final_norm")
    if projected:
        flags.add("projected")
    if not tied:
        flags.add("untied")
    return frozenset(flags)


def windows_of(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Tokens that each layer's sliding window keeps (transformers' `sliding_window`), None where it attends to all."""
    family = read.family
    if family.windows == "none":
        return (None,) * num_layers
    if read.config.get("use_bidirectional_attention"):
        raise read.error("use_bidirectional_attention is set, and only causal models run")
    unused = "use_sliding_window" in family.defaults and not read.flag("use_sliding_window")
    window = None if unused or read.value("sliding_window") is None else read.size("sliding_window")
    if family.windows == "all_layers":
        return (window,) * num_layers
    types = read.config.get("layer_types")
    if types is None:
        types = _default_layer_types(read, num_layers, window)
    if not isinstance(types, (list, tuple)) or len(types) != num_layers:
        raise read.error(f"layer_types must name the kind of each of the {num_layers} layers")
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise read.error(f"layer_types holds {unknown[0]!r:.40}; those that run are full_attention and sliding_attention")
    if window is None and "sliding_attention" in types:
        raise read.error("layer_types holds sliding_attention, but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _default_layer_types(read: ConfigReader, num_layers: int, window: int | None) -> list[str]:
    if "max_window_layers" in read.family.defaults:
        first = num_layers if window is None else read.value("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool):
            raise read.error(f"max_window_layers must be a whole number, not {first!r:.40}")
        even = read.family.windows == "even_layers" and window is not None
        windowed = [layer < first and layer % 2 == 0 if even else layer >= first for layer in range(num_layers)]
        return ["sliding_attention" if there else "full_attention" for there in windowed]
    pattern = read.size("sliding_window_pattern") if "sliding_window_pattern" in read.family.defaults else 2
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
