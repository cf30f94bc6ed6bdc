"""The main promise: with memory for 40 % of the weights, exactly what transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmoffload.checkpoint import Checkpoint, load_tokenizer, open_checkpoint
from lmoffload.executor import Engine, Request
from lmoffload.profiler.limits import disk_of
from lmoffload_solver.outcome import Optimal
from lmoffload_solver.plan import Plan
from lmoffload_solver.search import solve
from lmoffload_solver.workload import Limits, Workload
from tests.cli.machines import machine
from tests.executor.reference import greedy, load_reference, prompts
from tests.models import FAMILIES, tiny_checkpoint

TEXTS = (
    "The capital of France is",
    "Write a haiku about rain.\n",
    "def fibonacci(n):",
    "Once upon a time, there was a small town where nobody ever slept, because",
    "Water boils at",
    "안녕하세요, 오늘은",
    "The three primary colors are",
    "In 1969,",
)


def plan_for(checkpoint: Checkpoint, lengths: list[int], gen_len: int, share: float | None, micro_batch: int | None = None) -> Plan:
    outcome = solve(
        checkpoint.shape,
        machine(file_system=disk_of(Path.cwd()).mount_point),
        Workload.of_lengths(lengths, gen_len),
        Limits(weights_memory_share=share, micro_batch=micro_batch),
        model_fingerprint=checkpoint.fingerprint,
    )
    assert isinstance(outcome, Optimal), outcome
    return outcome.plan


@pytest.mark.parametrize(("family", "num_layers"), [*((family, 4) for family in FAMILIES), ("llama", 2), ("gemma2", 2)])
def test_tiny_models(tmp_path, family, num_layers):
    checkpoint = open_checkpoint(tiny_checkpoint(family, tmp_path / "model", num_layers=num_layers, dtype="bf16"))
    texts = prompts(checkpoint.shape.vocab_size)
    model = load_reference(checkpoint.path)
    expected = [greedy(model, text, 6) for text in texts]
    for micro_batch in (1, 2, 3, 5):
        plan = plan_for(checkpoint, [len(text) for text in texts], 6, 0.4, micro_batch)
        assert plan.weights.bytes["disk"] > 0
        with Engine(checkpoint, plan) as engine:
            done = engine.generate([Request(str(i), tuple(text), 6) for i, text in enumerate(texts)])
            report = engine.report()
        assert [list(completion.token_ids) for completion in done] == expected
        assert report.bytes_read > 0
        held = report.resident_bytes["host"] + sum(store.ring_bytes for store in engine.stores)
        assert held <= 0.4 * sum(plan.weights.bytes.values()) + page_rounding(checkpoint, plan)


def page_rounding(checkpoint: Checkpoint, plan: Plan) -> int:
    """Tensors are read as whole pages; on a model of a few KiB that shows."""
    return 8192 * (plan.prefetch_depth + 1) * sum(t.is_matrix for t in checkpoint.shape.by_layer[0])


@pytest.fixture(scope="module")
def smollm2(trained_file: Path) -> Checkpoint:
    return open_checkpoint(trained_file)


@pytest.fixture(scope="module")
def tokens(smollm2: Checkpoint) -> list[list[int]]:
    tokenizer = load_tokenizer(smollm2)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def test_smollm2(smollm2, tokens):
    model = load_reference(smollm2.path)
    expected = [[token for token in greedy(model, text, 8) if token != 2] for text in tokens]
    for micro_batch in (1, 3):
        plan = plan_for(smollm2, [len(text) for text in tokens], 8, 0.4, micro_batch)
        with Engine(smollm2, plan) as engine:
            done = engine.generate([Request(str(i), tuple(text), 8) for i, text in enumerate(tokens)])
            report = engine.report()
        assert [list(completion.token_ids) for completion in done] == expected
        assert report.bytes_read > 0.5 * 8 * plan.weights.bytes["disk"]
        assert report.resident_bytes["host"] + sum(store.ring_bytes for store in engine.stores) <= 0.4 * sum(plan.weights.bytes.values())
    assert "Paris" in load_tokenizer(smollm2).decode(expected[0])


def test_perplexity_of_offloaded_and_resident_runs_is_equal(smollm2):
    tokenizer = load_tokenizer(smollm2)
    text = Path(__file__).parents[2].joinpath("LICENSE").read_text(encoding="utf-8")
    pieces = [tokenizer(text)["input_ids"][i : i + 160] for i in (0, 160, 320)]
    perplexities = []
    for share in (0.4, None):
        with Engine(smollm2, plan_for(smollm2, [160] * 3, 1, share)) as engine:
            perplexities.append(float(torch.exp(-torch.cat([score.log_probabilities for score in engine.score(pieces)]).mean())))
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-5)
    assert perplexities[0] < 60, "random weights give 50,000"


def test_logits_of_a_row_are_the_same_bits_in_any_batch(smollm2, tokens):
    alone = plan_for(smollm2, [80], 1, 0.4, 1)
    with Engine(smollm2, alone) as engine:
        expected = [engine.first_logits([text])[0] for text in tokens]
    together = plan_for(smollm2, [80] * 8, 1, None, 8)
    with Engine(smollm2, together) as engine:
        for got, want in zip(engine.first_logits(tokens), expected, strict=True):
            assert torch.equal(got, want)
