"""Results in memory that is used again: with every result so, however small, tokens are those of transformers."""

from __future__ import annotations

import random

import pytest

from lmoffload.kernels import pages
from lmoffload_solver.pipeline import Pipeline
from tests.executor.device_plans import device_plan, make_decision, random_decision
from tests.executor.plans import make_plan
from tests.executor.test_device import LENGTHS, NEW_TOKENS, expected, generate  # noqa: F401
from tests.models import FAMILIES


@pytest.fixture(autouse=True)
def every_result(monkeypatch):
    """No result is too small to be used again."""
    monkeypatch.setattr(pages, "LEAST_BYTES", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_host(tiny, expected, tmp_path, family):  # noqa: F811
    checkpoint = tiny(family, dtype="bf16")
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=3, num_micro_batches=2)
    assert generate(checkpoint, plan, tmp_path) == expected(family, dtype="bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_device(tiny, expected, tmp_path, family):  # noqa: F811
    checkpoint, chance = tiny(family, dtype="bf16"), random.Random(family)
    plan = device_plan(checkpoint, random_decision(checkpoint.shape, chance, hidden="host"), LENGTHS, NEW_TOKENS)
    assert generate(checkpoint, plan, tmp_path) == expected(family, dtype="bf16")


def test_on_two_devices(tiny, expected, tmp_path):  # noqa: F811
    checkpoint = tiny("llama", num_layers=3)
    decision = make_decision(checkpoint.shape, hidden="device", homes="host", num_micro_batches=3, pipeline=Pipeline((1, 2), 2))
    plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS)
    assert generate(checkpoint, plan, tmp_path) == expected("llama", num_layers=3)
