"""Projections of decode time from the first steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload.bench.projection import decode_seconds, growth_per_step


@given(st.floats(0.01, 10), st.floats(0, 1), st.integers(6, 20), st.integers(16, 512), st.integers(0, 200))
def test_steps_that_grow_evenly_are_projected_exactly(fixed: float, share: float, known: int, length: int, more: int) -> None:
    """A step of `fixed` seconds and, for every token attended to, as much as makes up to all of it attention."""
    per_token = share * fixed / length
    steps = [fixed + per_token * (length + at) for at in range(known + more)]
    assert decode_seconds(steps[:known], len(steps), length) == pytest.approx(sum(steps), rel=1e-6)


def test_noise_is_not_taken_for_growth() -> None:
    """Seven steps with 3 % of noise and none of growth: 63 steps are projected within 5 %, for every one of 200 seeds."""
    for seed in range(200):
        generator = random.Random(seed)
        steps = [1 + 0.03 * generator.uniform(-1, 1) for _ in range(63)]
        assert decode_seconds(steps[:7], 63, 64) == pytest.approx(sum(steps), rel=0.05)


def test_a_slow_first_step_is_counted_once() -> None:
    steps = [9.0] + [1.0] * 62
    assert decode_seconds(steps[:7], 63, 64) == pytest.approx(71.0)


def test_growth_is_never_more_than_attention_could_cost() -> None:
    assert growth_per_step([1.0, 2.0, 3.0, 4.0], 64) == pytest.approx(2.5 / (64 + 1.5))
    assert growth_per_step([4.0, 3.0, 2.0, 1.0], 64) == 0.0
    assert growth_per_step([1.0, 2.0, 3.0], 64) == 0.0


def test_nothing_to_project() -> None:
    assert decode_seconds([1.0, 2.0], 2, 10) == 3.0
    assert decode_seconds([1.0, 2.0, 5.0], 2, 10) == 3.0
    assert decode_seconds([], 0, 10) == 0.0
