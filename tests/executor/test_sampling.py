"""Sampling held against transformers' own generation: settings, their order, penalties, log-probabilities."""

from __future__ import annotations

import pytest
import torch

from lmoffload.executor import Engine, Request, Sampling
from lmoffload.executor.sampling import Sampler
from lmoffload_solver.errors import StatedError
from tests.executor.plans import make_plan
from tests.executor.reference import load_reference, prompts

SETTINGS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7, "temperature": 1.3},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids="+".join)
def test_scores_are_those_of_transformers(tiny, settings):
    """What its `generate` samples from at each step, from the same logits; as the request's wishes, and as the model's file has them."""
    checkpoint = tiny("llama")
    model = load_reference(checkpoint.path)
    prompt = prompts(checkpoint.shape.vocab_size)[2]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        torch.manual_seed(0)
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=True, return_dict_in_generate=True, output_scores=True, output_logits=True,
            **{**neutral, **settings},
        )  # fmt: skip
    wished = settings if settings.keys() - {"repetition_penalty"} else {**settings, "temperature": 1.0}
    for sampler in (
        Sampler.of(Request("a", (1,), 1, Sampling(**wished)), {}, checkpoint.shape.vocab_size),
        Sampler.of(Request("a", (1,), 1), {"do_sample": True, **settings}, checkpoint.shape.vocab_size),
    ):
        for step, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
            before = out.sequences[:, : len(prompt) + step]
            assert torch.equal(sampler.processors(before, logits.clone()), scores)


def test_a_repetition_penalty_without_sampling(tiny):
    checkpoint = tiny("llama")
    model = load_reference(checkpoint.path)
    texts = prompts(checkpoint.shape.vocab_size)[:3]
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=3)
    with Engine(checkpoint, plan) as engine:
        asked = [Request(str(i), tuple(text), 12, Sampling(repetition_penalty=1.8)) for i, text in enumerate(texts)]
        done = [list(completion.token_ids) for completion in engine.generate(asked)]
        plain = [list(completion.token_ids) for completion in engine.generate([Request("0", tuple(texts[0]), 12)])]
    for text, tokens in zip(texts, done, strict=True):
        with torch.no_grad():
            expected = model.generate(torch.tensor([text]), max_new_tokens=12, do_sample=False, repetition_penalty=1.8)
        assert tokens == expected[0, len(text) :].tolist()
    assert done[0] != plain[0]


def test_log_probabilities_are_the_models(tiny):
    """Of the tokens chosen, before any setting; an end token's is left out as the token is; in any batch."""
    checkpoint = tiny("llama", eos_token_id=tuple(range(0, 128, 9)))
    model = load_reference(checkpoint.path)
    texts = prompts(checkpoint.shape.vocab_size)[:4]
    sampling = Sampling(temperature=1.5, top_k=20, seed=4)
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=3)) as engine:
        done = engine.generate([Request(str(i), tuple(t), 10, sampling, log_probabilities=True) for i, t in enumerate(texts)])
        silent = engine.generate([Request("0", tuple(texts[0]), 10, sampling)])[0]
    assert silent.log_probabilities is None and silent.token_ids == done[0].token_ids
    assert any(completion.finish_reason == "stop" for completion in done)
    for text, completion in zip(texts, done, strict=True):
        told = completion.log_probabilities
        assert told is not None and len(told) == len(completion.token_ids)
        if not told:
            continue
        whole = torch.tensor([[*text, *completion.token_ids]])
        with torch.no_grad():
            expected = torch.log_softmax(model(whole).logits[0, len(text) - 1 : -1], dim=-1)
        expected = expected.gather(1, whole[0, len(text) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(told), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [{"min_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"repetition_penalty": float("inf")}, {"temperature": float("nan")}],
)
def test_settings_without_meaning(wrong):
    with pytest.raises(StatedError, match=next(iter(wrong))):
        Sampler.of(Request("a", (1,), 1, Sampling(**wrong)), {}, 10)
