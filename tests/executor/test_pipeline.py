"""Runs with several emulated accelerators give what transformers gives, however layers are split and however late copies are."""

from __future__ import annotations

import random

import pytest

from lmoffload_solver.pipeline import Pipeline
from tests.executor.device_plans import PLACES, device_plan, make_decision, random_decision
from tests.executor.test_device import LENGTHS, NEW_TOKENS, expected, generate, late  # noqa: F401
from tests.models import FAMILIES


def random_pipeline(chance: random.Random, num_layers: int, num_stages: int, num_batches: int) -> Pipeline:
    cuts = sorted(chance.sample(range(1, num_layers), num_stages - 1))
    layers = tuple(end - first for first, end in zip([0, *cuts], [*cuts, num_layers], strict=True))
    return Pipeline(layers, chance.randint(1, min(num_stages, num_batches)))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_placements_on_two_accelerators(tiny, expected, tmp_path, family, late):  # noqa: F811
    checkpoint, chance = tiny(family, dtype="bf16"), random.Random(f"two {family}")
    count = chance.choice([1, 2, 3])
    pipeline = random_pipeline(chance, checkpoint.shape.num_layers, 2, count)
    decision = random_decision(checkpoint.shape, chance, pipeline=pipeline, num_micro_batches=count)
    assert generate(checkpoint, device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS), tmp_path) == expected(family, dtype="bf16")


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("unit", PLACES, ids=lambda unit: f"{unit.home}-{unit.attends}")
def test_keys_and_values_in_each_place_at_every_stage(tiny, expected, tmp_path, unit, num_stages, late):  # noqa: F811
    """Hidden states pass on from layers that the device attends to, and from layers that the host does."""
    checkpoint, chance = tiny("llama", num_layers=3), random.Random(num_stages)
    hidden = chance.choice(["device", "host"])
    decision = make_decision(
        checkpoint.shape, kv=unit, hidden=hidden, homes="disk", micro_batch=2, num_micro_batches=3,
        pipeline=random_pipeline(chance, 3, num_stages, 3),
    )  # fmt: skip
    plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS)
    assert generate(checkpoint, plan, tmp_path) == expected("llama", num_layers=3)


def test_hidden_states_of_fewer_rows_than_products_compute(tiny, expected, tmp_path):  # noqa: F811
    """Tokens that are not padded, in products that are: what lies behind the rows is no part of them."""
    sizes = {"num_layers": 2, "dtype": "bf16", "head_dim": 64, "intermediate_size": 128}
    checkpoint = tiny("llama", **sizes)
    decision = make_decision(checkpoint.shape, hidden="device", micro_batch=3, num_micro_batches=2, pipeline=Pipeline((1, 1), 1))
    plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS)
    assert generate(checkpoint, plan, tmp_path) == expected("llama", **sizes)
