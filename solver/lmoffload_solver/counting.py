"""The place that counts bytes and FLOPs: stored, moved, read; per tensor, layer, phase. Nothing else multiplies sizes.

Class "exact" on the CPU: hidden states, keys and values are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from lmoffload_solver.formats import KV_LINE_BYTES, LINE_ELEMENTS, PARAMETER_BYTES, format_of, stored_bytes
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.schedule import PAGE_BYTES, STORE_GAP_BYTES, Spilled, Unit
from lmoffload_solver.value import TensorClass

Array = npt.NDArray[np.float64]

FEW_NUMBERS = 1 << 17
"""Numbers of hidden states up to which a layer's work is recorded (`lmoffload.modeling.recorder`)."""

ACTIVATION_BYTES = 4
"""Bytes of one fp32 activation."""

LEAST_ROWS = 4
"""Rows that a product by torch's BLAS computes at least."""

VECTOR_ELEMENTS = 64
"""Elements that torch's vectorised loops take at once (four AVX-512 registers)."""

POSITION_BYTES = 8
"""One int64 position id per token."""


def token_multiple(model: ModelShape) -> int:
    """Tokens of a packed micro-batch are padded to a multiple of this, so that elementwise loops over them leave nothing to the scalar
    code behind the vectorised one, whose last bits may differ."""
    sizes = [model.hidden_size, model.intermediate_size]
    sizes += [size for layer in model.layers for size in (layer.key_dim, layer.value_dim)]
    sizes += [model.expert_size] * (model.expert_size > 0) + [1] * model.has_scalar_gates
    return max(VECTOR_ELEMENTS // gcd(VECTOR_ELEMENTS, size) for size in sizes)


def padded(count: int, multiple: int) -> int:
    """Tokens that elementwise loops compute for `count`; products leave the padding out."""
    return -(-count // multiple) * multiple


NEWEST_FORMAT = "bf16"
"""Of the newest keys, fewer than 32, whose channels cannot be quantized yet."""


# Weights


def few_tokens(model: ModelShape) -> int:
    """Tokens up to which a layer's work is recorded, and done again without Python; none in layers of experts."""
    return 0 if model.experts_per_token else FEW_NUMBERS // model.hidden_size


def tensor_bytes(tensor: TensorShape, format_name: str | None = None) -> int:
    """Stored bytes of a tensor, in its own format or another.

    Raises:
        StatedError: the shape is not a whole number of the format's blocks, or the format is unknown.
    """
    return stored_bytes(tensor.shape, format_name or tensor.format)


def weights_bytes(model: ModelShape) -> int:
    """Stored bytes of all tensors; a tied head is the embedding and counts once."""
    return sum(tensor_bytes(tensor) for tensor in model.tensors)


def class_bytes(model: ModelShape) -> dict[TensorClass, int]:
    """Stored bytes of each class of tensors."""
    total: dict[TensorClass, int] = {}
    for tensor in model.tensors:
        total[tensor.tensor_class] = total.get(tensor.tensor_class, 0) + tensor_bytes(tensor)
    return total


def matrix_size(tensor: TensorShape) -> tuple[int, int]:
    """(N, K): rows, all leading dimensions flattened, and columns of a matrix."""
    return prod(tensor.shape[:-1]), tensor.shape[-1]


def row_bytes(tensor: TensorShape) -> int:
    """Stored bytes of one row of a matrix."""
    return stored_bytes((tensor.shape[-1],), tensor.format)


def vector_bytes(model: ModelShape) -> int:
    """Bytes that tensors that are no matrices (norms, biases) take in memory: they are kept widened to fp32. Tables are not held."""
    return sum(ACTIVATION_BYTES * prod(tensor.shape) for tensor in model.tensors if not tensor.is_matrix and not tensor.is_table)


def layer_matrices(model: ModelShape, layer: int) -> tuple[TensorShape, ...]:
    """The matrices of a decoder layer."""
    return tuple(tensor for tensor in model.by_layer[layer] if tensor.is_matrix)


def num_linears(model: ModelShape, layer: int) -> int:
    """Linear layers called in one decoder layer."""
    return len(layer_matrices(model, layer))


def moved_bytes(units: tuple[Unit, ...]) -> int:
    """Stored bytes moved to the compute tier in one step."""
    return sum(unit.streamed_bytes for unit in units)


# KV cache and hidden states


def kv_bytes_per_token(layer: LayerShape, key_format: str = "fp32", value_format: str = "fp32") -> int:
    """Bytes that one more token of a long sequence takes at one layer: kv_heads · (key_dim · key bits + value_dim · value bits) / 8."""
    key, value = (
        key_group_bytes(layer.key_dim, key_format)
        if key_format in KV_LINE_BYTES
        else LINE_ELEMENTS * value_token_bytes(layer.key_dim, key_format),
        LINE_ELEMENTS * value_token_bytes(layer.value_dim, value_format),
    )
    return -(-layer.num_kv_heads * (key + value) // LINE_ELEMENTS)


def kv_tokens(layer: LayerShape, tokens: int) -> int:
    """Tokens of a sequence of `tokens` that a layer keeps: a sliding window caps them."""
    return tokens if layer.window is None else min(tokens, layer.window)


def key_room(layer: LayerShape, tokens: int, key_format: str) -> int:
    """What a head's keys have room for in a sequence of up to `tokens` tokens: tokens, or whole groups of 32 where they are quantized."""
    if key_format not in KV_LINE_BYTES:
        return kv_tokens(layer, tokens)
    groups = tokens // LINE_ELEMENTS
    return groups if layer.window is None else min(groups, -(-layer.window // LINE_ELEMENTS))


def key_group_bytes(key_dim: int, key_format: str) -> int:
    """Bytes of a quantized group of 32 tokens' keys of one head: for each channel, a line of codes and its parameter."""
    return key_dim * (KV_LINE_BYTES[key_format] + PARAMETER_BYTES)


def key_head_bytes(key_dim: int, room: int, key_format: str) -> int:
    """Bytes of one head's keys of one sequence with a `key_room`; the newest 32 tokens of quantized keys have room in bf16."""
    if key_format not in KV_LINE_BYTES:
        return room * key_dim * _size(key_format)
    return room * key_group_bytes(key_dim, key_format) + LINE_ELEMENTS * key_dim * _size(NEWEST_FORMAT)


def value_token_bytes(value_dim: int, value_format: str) -> int:
    """Bytes of one head's values of one token; where they are quantized, as whole lines of 32 channels."""
    if value_format not in KV_LINE_BYTES:
        return value_dim * _size(value_format)
    return num_lines(value_dim) * (KV_LINE_BYTES[value_format] + PARAMETER_BYTES)


def num_lines(channels: int) -> int:
    """Lines of 32 that hold a token's channels."""
    return -(-channels // LINE_ELEMENTS)


def layer_kv_bytes(layer: LayerShape, tokens: int, key_format: str = "fp32", value_format: str = "fp32") -> int:
    """Bytes of one sequence's keys and values at a layer, with room for `tokens` tokens."""
    value = layer.num_kv_heads * kv_tokens(layer, tokens) * value_token_bytes(layer.value_dim, value_format)
    return layer_key_bytes(layer, tokens, key_format) + value


def layer_key_bytes(layer: LayerShape, tokens: int, key_format: str = "fp32") -> int:
    """Of them the keys."""
    return layer.num_kv_heads * key_head_bytes(layer.key_dim, key_room(layer, tokens, key_format), key_format)


def spilled(layer: LayerShape, row_tokens: Sequence[int], key_format: str = "fp32", value_format: str = "fp32") -> Spilled:
    """Keys and values of a micro-batch at a layer as they lie on the disk, keys and values each in whole pages. A new token touches a page
    of each head's keys and of its values, of quantized ones a page of codes and one of parameters for every 32 channels."""
    key = sum(layer_key_bytes(layer, tokens, key_format) for tokens in row_tokens)
    both = sum(layer_kv_bytes(layer, tokens, key_format, value_format) for tokens in row_tokens)
    return spilled_bytes(layer, key, both - key, len(row_tokens), value_format)


def spilled_bytes(layer: LayerShape, key: int, value: int, num_rows: int, value_format: str) -> Spilled:
    """The same from the bytes of all keys and of all values."""
    size = whole_pages(key) + whole_pages(value)
    pages = changed_pages(layer, value_format)
    apart = num_rows * layer.num_kv_heads * pages
    written = apart * (PAGE_BYTES + STORE_GAP_BYTES)
    return Spilled(size, min(size, written), apart if written <= size else 1)


def changed_pages(layer: LayerShape, value_format: str) -> int:
    """Pages of a head's keys and values that a new token touches."""
    return 1 + (2 * num_lines(layer.value_dim) if value_format in KV_LINE_BYTES else 1)


def whole_pages(num_bytes: int) -> int:
    """Bytes of the pages that hold `num_bytes`."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def kv_bytes(model: ModelShape, tokens: int, key_format: str = "fp32", value_format: str = "fp32") -> int:
    """Bytes of one sequence's keys and values over all layers, with room for `tokens` tokens."""
    return sum(layer_kv_bytes(layer, tokens, key_format, value_format) for layer in model.layers)


def _size(plain_format: str) -> int:
    return format_of(plain_format).block_bytes


def hidden_bytes(model: ModelShape, tokens: int) -> int:
    """Bytes of the hidden state of `tokens` tokens between two layers."""
    return ACTIVATION_BYTES * model.hidden_size * tokens


def suspended_bytes(model: ModelShape, tokens: int) -> int:
    """Bytes that a suspended micro-batch of `tokens` tokens keeps: hidden state, position ids, and the cosines and sines of the rotary
    embedding (one pair per different head size and window kind)."""
    kinds = {(layer.key_dim, layer.window is None) for layer in model.layers}
    rotary = sum(2 * ACTIVATION_BYTES * key_dim for key_dim, _ in kinds)
    return hidden_bytes(model, tokens) + tokens * (POSITION_BYTES + rotary)


# Work


def linear_flops(tokens: int, n: int, k: int) -> int:
    """FLOPs of a linear layer [N, K] over `tokens` rows: 2·M·N·K."""
    return 2 * tokens * n * k


def layer_linear_flops(model: ModelShape, layer: int, tokens: int) -> int:
    """FLOPs of a decoder layer's linear layers; a token meets `experts_per_token` of a tensor's experts."""
    return sum(
        linear_flops(tokens, *matrix_size(tensor)) * experts_met(model, tensor) // tensor.num_experts
        for tensor in layer_matrices(model, layer)
    )


def experts_met(model: ModelShape, tensor: TensorShape) -> int:
    """Matrices of a tensor that one token is multiplied with."""
    return model.experts_per_token if tensor.tensor_class == "experts" else 1


def experts_hit(num_experts: int, per_token: int, tokens: Array) -> Array:
    """Expected number of different experts that `tokens` tokens choose, each `per_token` of them, all alike likely and independently:
    E · (1 − (1 − k / E) ^ tokens). All others are neither read from memory nor computed."""
    return np.asarray(num_experts * (1.0 - (1.0 - per_token / num_experts) ** tokens))


def head_flops(model: ModelShape, rows: int) -> int:
    """FLOPs of the output head over one token of each of `rows` sequences."""
    return linear_flops(rows, *matrix_size(model.head))


def prefill_attention_flops(layer: LayerShape, length: int) -> float:
    """FLOPs of causal attention over a prompt of `length` tokens: 2·heads·(key_dim + value_dim) · pairs, where a full layer has length²/2
    pairs of query and key, and a window w leaves w·length − w²/2 of them."""
    window = layer.window
    pairs = length * length / 2 if window is None or length <= window else window * length - window * window / 2
    return 2 * layer.num_heads * (layer.key_dim + layer.value_dim) * pairs


def decode_attention_bytes(layer: LayerShape, context: int, key_format: str = "fp32", value_format: str = "fp32") -> int:
    """KV bytes that one sequence's attention reads in a decode step with `context` tokens, the newest included."""
    kept = kv_tokens(layer, context)
    if key_format not in KV_LINE_BYTES:
        key = kept * layer.key_dim * _size(key_format)
    else:
        groups = context // LINE_ELEMENTS - (context - kept) // LINE_ELEMENTS
        newest = context % LINE_ELEMENTS * layer.key_dim * _size(NEWEST_FORMAT)
        key = groups * key_group_bytes(layer.key_dim, key_format) + newest
    return layer.num_kv_heads * (key + kept * value_token_bytes(layer.value_dim, value_format))


def elementwise_bytes(model: ModelShape, layer: int, tokens: int) -> int:
    """Bytes that a decoder layer reads and writes outside its products and its attention, in fp32:

    two norms (each reads, writes a normed copy, and rereads it: 3·hidden), two residual additions (read two, write one: 3·hidden);
    rotary embedding of q and k (two products, a rotated copy, a sum: 8 · their width); k and v appended to the cache (2 · their width);
    activation and gate (read and write one, read two and write one: 5·intermediate, of all experts of a token);
    a token gathered for each of its experts, their outputs weighted and added (read and write twice, read two and write one: 7·hidden).
    The profiler divides measured time by this count, so that only its proportions between models matter.
    """
    shape = model.layers[layer]
    query = shape.num_heads * shape.key_dim
    key, value = shape.num_kv_heads * shape.key_dim, shape.num_kv_heads * shape.value_dim
    floats = 12 * model.hidden_size + 8 * (query + key) + 2 * (key + value) + 5 * model.mlp_width
    if any(tensor.tensor_class == "experts" for tensor in model.by_layer[layer]):
        floats += 7 * model.experts_per_token * model.hidden_size
    return ACTIVATION_BYTES * floats * tokens


def main_format(model: ModelShape, tensor_class: TensorClass | None = None) -> str:
    """The stored format of most bytes of the matrices (of a class)."""
    total: dict[str, int] = {}
    for tensor in model.tensors:
        if tensor_class is None and not tensor.is_matrix:
            continue
        if tensor_class is None or tensor.tensor_class == tensor_class:
            total[tensor.format] = total.get(tensor.format, 0) + tensor_bytes(tensor)
    return max(total, key=lambda name: (total[name], format_of(name).bits_per_element))
