"""Mixtures of experts: what transformers gives, resident and with memory for 40 % of the weights, and no bit depends on the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmoffload.executor import Engine, Request
from lmoffload.modeling.experts import BoundExperts
from lmoffload.profiler.limits import disk_of
from lmoffload_solver.outcome import Optimal
from lmoffload_solver.search import solve
from lmoffload_solver.workload import Limits, Workload
from tests.cli.machines import machine
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts
from tests.models import EXPERT_FAMILIES

NEW_TOKENS = 4
LENGTHS = (3, 17, 1, 30)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_greedy_tokens_equal_transformers_resident_and_streamed(tiny, family):
    dtype = "fp32" if family == "qwen2_moe" else "bf16"  # its matrices are so small that the pages around them would not fit
    checkpoint = tiny(family, num_layers=3, dtype=dtype)
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    model = load_reference(checkpoint.path)
    expected = [greedy(model, text, NEW_TOKENS) for text in texts]
    offloaded = solve(
        checkpoint.shape,
        machine(file_system=disk_of(Path.cwd()).mount_point),
        Workload.of_lengths(list(LENGTHS), NEW_TOKENS),
        Limits(weights_memory_share=0.4, micro_batch=2),
        model_fingerprint=checkpoint.fingerprint,
    )
    assert isinstance(offloaded, Optimal) and offloaded.plan.num_micro_batches > 1
    kernel = offloaded.plan.kernels.prefill
    plans = {
        "resident": make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=1, num_micro_batches=4, kernel=kernel),
        "40 %": offloaded.plan,
        "cut": make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=3, stream="matrix", kernel=kernel),
    }
    experts = {t.name for t in checkpoint.shape.tensors if t.tensor_class == "experts"}
    assert any(offloaded.plan.weights.tensors[name].tier == "disk" for name in experts)
    logits = {}
    for name, plan in plans.items():
        with Engine(checkpoint, plan) as engine:
            done = engine.generate([Request(str(i), tuple(text), NEW_TOKENS) for i, text in enumerate(texts)])
            assert [list(completion.token_ids) for completion in done] == expected, name
            assert engine.report().bytes_read > (NEW_TOKENS - 1) * plan.weights.bytes["disk"] * (plan.prefetch_depth > 0)
            logits[name] = engine.first_logits(texts)
    assert torch.equal(logits["resident"], logits["40 %"]) and torch.equal(logits["resident"], logits["cut"])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_fused_products_give_a_row_the_same_bits_in_any_batch(tiny, family):
    checkpoint = tiny(family, num_layers=3, dtype="bf16")
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    found = []
    for micro_batch in (1, 4):
        plan = make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=micro_batch, resident=set(), kernel="fused_dot")
        with Engine(checkpoint, plan) as engine:
            found.append(engine.first_logits(texts))
    assert torch.equal(found[0], found[1])


def test_experts_that_no_token_has_chosen_are_not_touched(tiny, monkeypatch):
    """One prompt of one token, padded to four: only the three experts that the token chose are multiplied with."""
    checkpoint = tiny("olmoe", num_layers=1)
    asked: list[tuple[str, int]] = []
    product = BoundExperts._product

    def counted(self, part, expert, rows):
        asked.append((part, expert))
        return product(self, part, expert, rows)

    monkeypatch.setattr(BoundExperts, "_product", counted)
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint)) as engine:
        engine.first_logits([[7]])
    assert len(asked) == len(set(asked)) == 2 * checkpoint.shape.experts_per_token
