"""Stops, sampling, limits and refusals of the engine."""

from __future__ import annotations

import pytest
import torch

from lmoffload.executor import Engine, Request, Sampling
from lmoffload.executor.sampling import stop_token_ids
from lmoffload_solver.errors import StatedError
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts


def plan_of(checkpoint, **choices):
    return make_plan(checkpoint.shape, checkpoint.fingerprint, **choices)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_eos", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 2}, 3, {7, 9}),
        ({"eos_token_id": 0}, {}, None, {0}),
        ({}, {"eos_token_id": 0}, 5, {0}),
        ({}, {"eos_token_id": None}, 5, {5}),
        ({}, {}, None, set()),
    ],
)
def test_end_tokens_of_every_form(generation, config, tokenizer_eos, expected):
    assert stop_token_ids(generation, config, tokenizer_eos) == expected


def test_an_end_token_ends_its_row_alone(tiny):
    plain = tiny("llama")
    text = prompts(plain.shape.vocab_size)[1]
    expected = greedy(load_reference(plain.path), text, 12)
    end = expected[4]
    first = expected.index(end)
    checkpoint = tiny("llama", eos_token_id=(end, 127))
    with Engine(checkpoint, plan_of(checkpoint, resident=set())) as engine:
        done = engine.generate([Request("a", tuple(text), 12), Request("b", tuple(text[:2]), 12), Request("c", tuple(text), 2)])
    assert done[0].finish_reason == "stop"
    assert list(done[0].token_ids) == expected[:first]
    assert done[2].finish_reason == ("length" if first >= 2 else "stop")
    assert list(done[1].token_ids) == [t for t in greedy(load_reference(checkpoint.path), text[:2], 12) if t not in (end, 127)]


def test_stop_strings(tiny):
    checkpoint = tiny("llama")
    text = prompts(checkpoint.shape.vocab_size)[1]

    def decode(ids):
        return "".join(f"<{i}>" for i in ids)

    with Engine(checkpoint, plan_of(checkpoint), decode=decode) as engine:
        whole = engine.generate([Request("a", tuple(text), 9)])[0].token_ids
        stopped = engine.generate([Request("a", tuple(text), 9, stop=(f"<{whole[3]}>",))])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole[: whole.index(whole[3]) + 1]


def test_the_request_wins_over_the_models_own_generation_settings(tiny):
    checkpoint = tiny("llama")
    from lmoffload.executor.sampling import Sampler

    def sampler(sampling: Sampling, **defaults):
        return Sampler.of(Request("a", (1,), 1, sampling), defaults, checkpoint.shape.vocab_size)

    assert sampler(Sampling(), do_sample=False, temperature=0.6).generator is None
    assert sampler(Sampling(), do_sample=True, top_k=1).generator is not None
    assert sampler(Sampling(temperature=0), do_sample=True, top_k=5).generator is None
    logits = torch.randn(checkpoint.shape.vocab_size, generator=torch.Generator().manual_seed(0))
    for settings in (Sampling(top_k=1), Sampling(top_p=0.0), Sampling(temperature=1e-3, top_k=10**6)):
        assert sampler(settings).next_token(logits, [1]) == int(logits.argmax())
    seeded = [sampler(Sampling(seed=3, temperature=2.0)).next_token(logits, [1]) for _ in range(2)]
    assert seeded[0] == seeded[1]
    for wrong in (Sampling(temperature=-1), Sampling(top_p=1.5), Sampling(top_k=-2)):
        with pytest.raises(StatedError):
            sampler(wrong)


def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(tiny):
    checkpoint = tiny("llama")
    prompt = tuple(range(5, 15))
    temperatures = (0.0, 1e-320, 1e-100, 1e-29, 1e-12)
    with Engine(checkpoint, plan_of(checkpoint)) as engine:
        done = engine.generate([Request("a", prompt, 6, Sampling(temperature=t, seed=3)) for t in temperatures])
    assert len({completion.token_ids for completion in done}) == 1


def test_requests_that_cannot_be_run_fail_alone(tiny):
    checkpoint = tiny("llama")
    with Engine(checkpoint, plan_of(checkpoint)) as engine:
        done = engine.generate([Request("a", (), 3), Request("b", (5, 6), 3), Request("c", (5, 10**6), 3)])
    assert [completion.finish_reason for completion in done] == ["error", "length", "error"]
    assert "empty" in (done[0].error or "")
    assert "vocabulary" in (done[2].error or "")


def test_plans_that_do_not_hold_are_refused(tiny):
    checkpoint = tiny("llama")
    with pytest.raises(StatedError, match="made for the model"):
        Engine(checkpoint, make_plan(checkpoint.shape, "another"))
    plan = plan_of(checkpoint)
    wrong = plan.model_copy(update={"weights": plan.weights.model_copy(update={"bytes": {"host": 1, "disk": 0}})})
    with pytest.raises(StatedError, match="1 where the plan|plan has 1"):
        Engine(checkpoint, wrong)
    with Engine(checkpoint, plan_of(checkpoint, tokens=10)) as engine, pytest.raises(StatedError, match="up to 24 tokens"):
        engine.generate([Request(str(i), tuple(range(5, 25)), 4) for i in range(4)])


def test_overflowing_activations_are_an_error(tiny, tmp_path):
    import safetensors.torch

    from lmoffload.checkpoint import open_checkpoint
    from tests.models import tiny_checkpoint

    folder = tiny_checkpoint("llama", tmp_path / "m", dtype="bf16")
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e38
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    with Engine(checkpoint, plan_of(checkpoint)) as engine, pytest.raises(StatedError, match="not finite"):
        engine.generate([Request("a", (5, 6, 7), 3)])


def test_meter_counts_what_was_run(tiny):
    checkpoint = tiny("llama")
    plan = plan_of(checkpoint, resident=set(), micro_batch=2, num_micro_batches=2)
    with Engine(checkpoint, plan, keep_spans=True) as engine:
        engine.generate([Request(str(i), (5, 6, 7), 3) for i in range(6)])
        meter = engine.meter
    assert meter.tokens == 18
    assert meter.prompts == 6
    streamed = sum(1 for unit in engine.units if unit.streamed)
    assert meter.counts["read_weights"] == 2 * 3 * streamed
    assert meter.counts["compute"] == 3 * 3 * len(engine.units)
    for earlier, later in zip(meter.spans, meter.spans[1:], strict=False):
        if earlier.task.resource == later.task.resource:
            assert earlier.begin_s <= earlier.end_s <= later.end_s


def test_torch_has_its_threads_back_after_a_run(tiny):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        checkpoint = tiny("llama")
        with Engine(checkpoint, plan_of(checkpoint)) as engine:
            engine.generate([Request("a", (5, 6, 7), 3)])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
