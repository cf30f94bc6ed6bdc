"""Bytes and FLOPs of a toy, computed by hand: hidden 64, intermediate 128, 4 heads and 2 KV heads of 16, vocabulary 256, 4 layers, fp32."""

from __future__ import annotations

import numpy as np
import pytest

from lmoffload_solver import counting
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import LayerShape, ModelShape
from lmoffload_solver.schedule import aligned_bytes
from tests.solver.toys import make_model

LAYER = 4 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64)


def test_bytes_by_class() -> None:
    sizes = counting.class_bytes(make_model())
    assert sizes == {"embedding": 65536, "attention": 4 * 4 * 12288, "mlp": 4 * 4 * 24576, "norm": 5 * 256, "head": 65536}
    assert counting.weights_bytes(make_model()) == 4 * LAYER + 2 * 65536 + 5 * 256


def test_tied_head_counts_once() -> None:
    assert counting.weights_bytes(make_model(tied=True)) == counting.weights_bytes(make_model()) - 65536


def test_block_formats_store_scales() -> None:
    model = make_model(stored="q4_0")
    assert counting.tensor_bytes(model.by_name["0.gate"]) == 128 * 64 // 32 * 18
    assert counting.row_bytes(model.embedding) == 36
    with pytest.raises(StatedError, match="q8_0 blocks"):
        counting.tensor_bytes(make_model(hidden=40, num_heads=4).by_name["0.q"], "q8_0")


def test_kv_bytes_are_capped_by_windows() -> None:
    model = make_model(windows=(None, 10))
    assert counting.kv_bytes_per_token(model.layers[0]) == 2 * 2 * 16 * 4
    assert counting.kv_bytes_per_token(model.layers[0], "fp16", "fp32") == 2 * 16 * (2 + 4)
    assert counting.kv_bytes(model, 24) == 2 * 24 * 256 + 2 * 10 * 256


def test_quantized_kv() -> None:
    """32 tokens of a key channel are 32 or 16 bytes of codes and 4 of scale and zero; the newest 32 keys have room in bf16. A token's
    values are whole lines of 32 channels."""
    layer = LayerShape(num_heads=4, num_kv_heads=2, key_dim=40, value_dim=48)
    assert counting.key_room(layer, 100, "int8") == 3
    assert counting.layer_kv_bytes(layer, 100, "int8", "int8") == 2 * (3 * 40 * 36 + 32 * 40 * 2 + 100 * 2 * 36)
    assert counting.layer_kv_bytes(layer, 31, "int4-g32", "bf16") == 2 * (32 * 40 * 2 + 31 * 48 * 2)
    assert counting.kv_bytes_per_token(layer, "int4-g32", "int4-g32") == 2 * (40 * 20 / 32 + 2 * 20)
    assert counting.decode_attention_bytes(layer, 100, "int8", "int8") == 2 * (3 * 40 * 36 + 4 * 40 * 2 + 100 * 2 * 36)
    window = layer.model_copy(update={"window": 40})
    assert counting.key_room(window, 1000, "int8") == 2 and counting.key_room(window, 39, "int8") == 1
    assert counting.layer_kv_bytes(window, 1000, "int8", "int8") == 2 * (2 * 40 * 36 + 32 * 40 * 2 + 40 * 2 * 36)
    assert counting.decode_attention_bytes(window, 100, "int8", "int8") == 2 * (2 * 40 * 36 + 4 * 40 * 2 + 40 * 72), "tokens 60..99"


def test_suspended_state() -> None:
    assert counting.suspended_bytes(make_model(), 3) == 3 * (64 * 4 + 8 + 2 * 16 * 4)
    both_kinds = counting.suspended_bytes(make_model(windows=(None, 10)), 3)
    assert both_kinds == 3 * (64 * 4 + 8 + 2 * 2 * 16 * 4), "a model with two kinds of window may hold two rotary embeddings"


def test_flops() -> None:
    model = make_model()
    assert counting.layer_linear_flops(model, 0, 10) == 2 * 10 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    assert counting.head_flops(model, 3) == 2 * 3 * 256 * 64
    assert counting.num_linears(model, 0) == 7


def test_attention_amounts() -> None:
    full = LayerShape(num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16)
    assert counting.prefill_attention_flops(full, 100) == 4 * 4 * 16 * 100 * 100 / 2
    window = full.model_copy(update={"window": 10})
    assert counting.prefill_attention_flops(window, 8) == 4 * 4 * 16 * 32
    assert counting.prefill_attention_flops(window, 100) == 4 * 4 * 16 * (1000 - 50)
    assert counting.decode_attention_bytes(full, 100) == 100 * 256
    assert counting.decode_attention_bytes(window, 100) == 10 * 256


def test_tokens_are_padded_to_whole_vectors() -> None:
    assert counting.padded(1, 4) == 4
    assert counting.padded(8, 4) == 8
    assert counting.token_multiple(make_model()) == 4
    assert counting.token_multiple(make_model(hidden=32, num_heads=4)) == 8, "a head of 8 leaves 64/8 tokens to a vector"


def test_elementwise_bytes_grow_with_tokens_alone() -> None:
    model = make_model()
    one = counting.elementwise_bytes(model, 0, 1)
    assert one == 4 * (12 * 64 + 8 * (64 + 32) + 2 * (32 + 32) + 5 * 128)
    assert counting.elementwise_bytes(model, 0, 7) == 7 * one


def test_main_format_is_that_of_most_bytes() -> None:
    model = make_model(stored="bf16")
    head = model.head.model_copy(update={"format": "fp32"})
    mixed = model.model_copy(update={"tensors": (*model.tensors[:-1], head)})
    assert counting.main_format(mixed) == "bf16"
    assert counting.main_format(mixed, "head") == "fp32"


def with_experts() -> ModelShape:
    """The toy with 8 experts of 32 in layer 0, of which a token meets 2, each stored on its own."""
    toy = make_model()
    experts = (
        toy.tensors[1].model_copy(update={"name": "0.experts.up", "shape": (8, 64, 64), "tensor_class": "experts", "num_runs": 16}),
        toy.tensors[1].model_copy(update={"name": "0.experts.down", "shape": (8, 64, 32), "tensor_class": "experts", "num_runs": 8}),
    )
    kept = [t for t in toy.tensors if t.layer != 0 or t.tensor_class != "mlp"]
    fields = {name: getattr(toy, name) for name in ModelShape.model_fields}
    return ModelShape(**{**fields, "tensors": (*kept, *experts), "experts_per_token": 2, "expert_size": 32})


def test_experts() -> None:
    model = with_experts()
    assert counting.class_bytes(model)["experts"] == 4 * 8 * (64 * 64 + 64 * 32)
    assert counting.layer_linear_flops(model, 0, 3) == 2 * 3 * (12288 + 2 * (64 * 64 + 64 * 32))
    hit = counting.experts_hit(8, 2, np.array([1.0, 2.0, 1000.0]))
    assert hit == pytest.approx([2, 8 * (1 - 0.75**2), 8])
    assert model.mlp_width == 128
    assert counting.elementwise_bytes(model, 0, 1) - counting.elementwise_bytes(make_model(), 0, 1) == 4 * 7 * 2 * 64
    assert counting.elementwise_bytes(model, 1, 1) == counting.elementwise_bytes(make_model(), 1, 1)


def test_experts_become_tiles_of_their_own() -> None:
    experts = with_experts().by_name["0.experts.up"]
    assert experts.can_become("int8")
    assert not experts.model_copy(update={"shape": (8, 24, 64)}).can_become("int8"), "two experts would share a tile of 16 rows"
    assert aligned_bytes(8 * 16384, 8) == 8 * 5 * 4096, "each part may touch a page more than it fills"
