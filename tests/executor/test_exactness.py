"""Offloaded runs give what transformers gives, token for token and bit for bit in any batch."""

from __future__ import annotations

import pytest
import torch

from lmoffload.executor import Engine, Request
from lmoffload_solver import counting
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts
from tests.models import FAMILIES

NEW_TOKENS = 8
IN_FP32 = ("llama", "gemma3", "gpt_neox")
"""Stored in fp32, families differ in nothing that they do not differ in in bf16."""


def requests(texts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[Request]:
    return [Request(str(i), tuple(text), new_tokens) for i, text in enumerate(texts)]


@pytest.mark.parametrize(("family", "dtype"), [*((name, "bf16") for name in FAMILIES), *((name, "fp32") for name in IN_FP32)])
def test_greedy_tokens_equal_transformers(tiny, family, dtype):
    checkpoint = tiny(family, dtype=dtype)
    texts = prompts(checkpoint.shape.vocab_size)
    model = load_reference(checkpoint.path)
    expected = [greedy(model, text, NEW_TOKENS) for text in texts]
    resident = {t.name for t in checkpoint.shape.tensors if t.layer == 1}
    for micro_batch in (1, 2, 3, 5):
        stream = "layer" if micro_batch % 2 else "matrix"
        plan = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=resident, micro_batch=micro_batch, stream=stream)
        with Engine(checkpoint, plan) as engine:
            done = engine.generate(requests(texts))
            assert engine.bytes_read > 0
        assert [list(completion.token_ids) for completion in done] == expected
        assert {completion.finish_reason for completion in done} == {"length"}


def test_a_sharded_tied_fp16_checkpoint(tiny):
    checkpoint = tiny("llama", dtype="fp16", tied=True, sharded=True)
    texts = prompts(checkpoint.shape.vocab_size)
    model = load_reference(checkpoint.path)
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set())) as engine:
        done = engine.generate(requests(texts))
    assert [list(completion.token_ids) for completion in done] == [greedy(model, text, NEW_TOKENS) for text in texts]


def test_project_in_and_out_of_opt_350m(tiny):
    checkpoint = tiny("opt", word_embed_proj_dim=32, do_layer_norm_before=False)
    texts = prompts(checkpoint.shape.vocab_size)
    model = load_reference(checkpoint.path)
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set())) as engine:
        done = engine.generate(requests(texts))
    assert [list(completion.token_ids) for completion in done] == [greedy(model, text, NEW_TOKENS) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", ["widen_tiles", "fused_dot"])
def test_a_rows_logits_are_the_same_bits_in_any_batch(tiny, family, kernel):
    checkpoint = tiny(family, dtype="bf16", num_layers=2)
    texts = prompts(checkpoint.shape.vocab_size, (3, 1, 40, 7, 190, 12, 5))
    alone = make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=1, num_micro_batches=1, kernel=kernel)
    with Engine(checkpoint, alone) as engine:
        expected = [engine.first_logits([text])[0] for text in texts]
    together = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=4, threads=1, kernel=kernel)
    with Engine(checkpoint, together) as engine:
        for got, want in zip(engine.first_logits(texts), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("kernel", ["widen_tiles", "fused_dot"])
def test_one_token_alone_is_not_padded_and_has_the_same_bits(tiny, family, kernel):
    """All sizes are whole vectors, as those of real models are."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    checkpoint = tiny(family, dtype="bf16", num_layers=2, **sizes)
    assert counting.token_multiple(checkpoint.shape) == 1
    texts = prompts(checkpoint.shape.vocab_size, (1, 2, 3, 33, 1, 7))
    expected = []
    for micro_batch in (1, 6):
        plan = make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=micro_batch, num_micro_batches=1, kernel=kernel)
        with Engine(checkpoint, plan) as engine:
            if micro_batch == 1:
                expected = [engine.first_logits([text])[0] for text in texts]
                alone = [completion.token_ids for completion in engine.generate(requests(texts))]
                continue
            assert all(torch.equal(got, want) for got, want in zip(engine.first_logits(texts), expected, strict=True))
            assert [completion.token_ids for completion in engine.generate(requests(texts))] == alone


def test_decoded_tokens_do_not_depend_on_the_batch(tiny):
    """Sampling at a high temperature: a single differing bit would soon show."""
    from lmoffload.executor import Sampling

    checkpoint = tiny("llama")
    texts = prompts(checkpoint.shape.vocab_size)
    asked = [Request(f"r{i}", tuple(text), 20, Sampling(temperature=3.0, seed=7)) for i, text in enumerate(texts)]
    outputs = []
    for micro_batch, num_micro_batches, threads in ((1, 1, 1), (3, 2, 2), (8, 1, 2)):
        plan = make_plan(
            checkpoint.shape, checkpoint.fingerprint, micro_batch=micro_batch, num_micro_batches=num_micro_batches, threads=threads
        )
        with Engine(checkpoint, plan) as engine:
            outputs.append([completion.token_ids for completion in engine.generate(asked)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) == len(texts)


def test_scores_of_offloaded_and_resident_runs_are_equal(tiny):
    checkpoint = tiny("qwen3", dtype="bf16")
    texts = prompts(checkpoint.shape.vocab_size, (30, 12, 5))
    model = load_reference(checkpoint.path)
    with torch.no_grad():
        logits = model(torch.tensor([texts[0]])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(texts[0][1:])[:, None])[:, 0]
    scores = []
    for resident in (None, set()):
        with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=resident)) as engine:
            scores.append(engine.score(texts))
    for resident_score, offloaded in zip(*scores, strict=True):
        assert torch.equal(resident_score.log_probabilities, offloaded.log_probabilities)
        assert torch.equal(resident_score.likeliest, offloaded.likeliest)
    torch.testing.assert_close(scores[0][0].log_probabilities, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(scores[0][0].likeliest, logits.argmax(-1))


def test_a_text_given_token_by_token_scores_as_one_given_at_once(tiny):
    """Its tokens are not the likeliest ones, so that a program that went on with its own would differ."""
    checkpoint = tiny("llama")
    texts = prompts(checkpoint.shape.vocab_size, (30, 17, 12))
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=2)) as engine:
        whole, stepwise = engine.score(texts), engine.score(texts, num_decoded=9)
    for text, one, other in zip(texts, whole, stepwise, strict=True):
        assert len(other.likeliest) == len(text) - 1 and not torch.equal(one.likeliest, torch.tensor(text[1:]))
        torch.testing.assert_close(other.log_probabilities, one.log_probabilities, rtol=1e-4, atol=1e-4)
        assert torch.equal(other.likeliest, one.likeliest)


ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_scaled_rotary_embeddings_beyond_the_original_length(tiny, rope):
    options = {"rope_parameters": {"rope_theta": 10000.0, **rope}, "max_position_embeddings": 32}
    checkpoint = tiny("llama", **{key: _frozen(value) for key, value in options.items()})
    texts = prompts(checkpoint.shape.vocab_size, (3, 60, 31, 45))
    model = load_reference(checkpoint.path)
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=3)) as engine:
        done = engine.generate(requests(texts))
    assert [list(completion.token_ids) for completion in done] == [greedy(model, text, NEW_TOKENS) for text in texts]


def test_a_prompt_that_would_cross_longropes_switch_is_refused(tiny):
    half = 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": 32,
    }
    checkpoint = tiny("phi3", rope_parameters=_frozen(rope), max_position_embeddings=128, original_max_position_embeddings=32)
    texts = prompts(checkpoint.shape.vocab_size, (3, 60, 30))
    model = load_reference(checkpoint.path)
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=3)) as engine:
        done = engine.generate(requests(texts))
    for completion, text in zip(done[:2], texts, strict=False):
        assert list(completion.token_ids) == greedy(model, text, NEW_TOKENS)
    assert "at most 2 new tokens" in (done[2].error or "")


class _Frozen(dict):
    """A dict that can be a key of the fixture's cache."""

    def __hash__(self):
        return hash(str(self))


def _frozen(value):
    return _Frozen(value) if isinstance(value, dict) else value
