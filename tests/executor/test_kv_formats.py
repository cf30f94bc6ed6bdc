"""Plans with keys and values in every format: near what fp32 gives, the same bits in any batch, and bytes as counted."""

from __future__ import annotations

import pytest
import torch

from lmoffload.checkpoint import open_checkpoint
from lmoffload.executor import Engine, Request
from lmoffload.executor.kv_cache import KVCache, kv_bytes
from lmoffload_solver import counting
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import KV_FORMATS
from lmoffload_solver.model import LayerShape
from lmoffload_solver.plan import KVFormat
from tests.executor.plans import make_plan
from tests.executor.reference import prompts
from tests.executor.test_quantized import TEXT

PAIRS = [*((kind, kind) for kind in KV_FORMATS), ("int8", "bf16"), ("fp32", "int4-g32"), ("int4-g32", "int8")]
NEW_TOKENS = 8
"""So that groups of keys are filled while decoding."""


def tokens_of(checkpoint, texts, kv, new_tokens=NEW_TOKENS, **options):
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, kv=kv, tokens=256, **options)
    with Engine(checkpoint, plan) as engine:
        return [list(done.token_ids) for done in engine.generate([Request(str(i), tuple(t), new_tokens) for i, t in enumerate(texts)])]


@pytest.mark.parametrize("kv", PAIRS[1:])
def test_no_batch_changes_a_token(tiny, kv):
    """A model with windows and without: layers 1 and 2, and layer 3."""
    checkpoint = tiny("gemma3", num_layers=3, dtype="bf16")
    texts = prompts(checkpoint.shape.vocab_size, (5, 30, 60))
    alone = tokens_of(checkpoint, texts, kv, micro_batch=1, num_micro_batches=1)
    assert tokens_of(checkpoint, texts, kv, micro_batch=3, num_micro_batches=2) == alone
    assert all(len(tokens) == NEW_TOKENS for tokens in alone)


LOGIT_ERRORS = {"bf16": 0.004, "int8": 0.01, "int4-g32": 0.25}
"""Of a trained model's logits a few steps after the prompt, relative."""


def later_logits(checkpoint, kv, steps=4):
    """Logits [steps, vocabulary] of the steps that read the cache, whatever was chosen before being forced to be TEXT's continuation."""
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, kv=kv, tokens=256, micro_batch=1)
    with Engine(checkpoint, plan) as engine:
        (block,) = engine._split([row_of(engine, TEXT * 3, steps)], keep_logits=True)
        for _ in engine._blocks.run(block):
            block[0].rows[0].tokens[-1] = TEXT[len(block[0].kept_logits)]
        return torch.cat(block[0].kept_logits)


def row_of(engine, text, new_tokens):
    from lmoffload.executor.row import make_row

    return make_row(Request("a", tuple(text), new_tokens), {}, engine.shape.vocab_size)


def test_logits_of_a_trained_model(trained_file):
    checkpoint = open_checkpoint(trained_file)
    exact = later_logits(checkpoint, ("fp32", "fp32"))
    errors, found = {}, {}
    for kind in KV_FORMATS[1:]:
        logits = later_logits(checkpoint, (kind, kind))
        found[kind] = logits.argmax(dim=1).tolist()
        assert torch.equal(logits[0], exact[0]), "the prompt attends to its own fresh keys and values"
        errors[kind] = ((logits - exact).norm(dim=1) / exact.norm(dim=1))[1:]
        assert 0 < errors[kind].max() < LOGIT_ERRORS[kind], errors
    assert found["bf16"] == found["int8"] == exact.argmax(dim=1).tolist(), "the greedy tokens are the same"
    assert errors["bf16"].max() < errors["int8"].max() < errors["int4-g32"].max()


@pytest.mark.parametrize("kv", PAIRS)
def test_bytes_are_those_counted(kv):
    kinds = (80, None), (33, 40), (64, 7)
    layers = [LayerShape(num_heads=4, num_kv_heads=2, key_dim=dim, value_dim=32, window=window) for dim, window in kinds]
    formats, rows = KVFormat(key=kv[0], value=kv[1]), [1, 31, 32, 33, 200]
    counted = sum(counting.layer_kv_bytes(layer, tokens, *kv) for layer in layers for tokens in rows)
    assert KVCache(layers, rows, formats).num_bytes == kv_bytes(layers, rows, formats) == counted


def test_a_class_allows_its_formats_alone(tiny):
    checkpoint = tiny("llama")
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, kv=("int8", "int4-g32"))
    for quality, word in (("exact", "keys as int8"), ("int8", "values as int4-g32"), ("int4", ""), ("any", "")):
        asked = plan.model_copy(update={"quality": quality})
        if not word:
            Engine(checkpoint, asked).close()
            continue
        with pytest.raises(StatedError, match=word):
            Engine(checkpoint, asked)
    unknown = plan.model_copy(update={"kv": plan.kv.model_copy(update={"format": KVFormat(key="int3", value="int8")})})
    with pytest.raises(StatedError, match="keys as int3"):
        Engine(checkpoint, unknown)
