"""Machines without a device: the search against every plan there is, and what is promised of larger jobs."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.solver.host_instances import CHANGES, brute_force, larger_instance, more_of, off_by, random_instance

SAME = 1e-9


@pytest.mark.parametrize("seed", [2, 4, 8, 9, 10])
def test_the_search_finds_the_best_of_all_plans(seed: int) -> None:
    instance = random_instance(seed)
    search = instance.search()
    found, (best, tried) = search.run(), brute_force(instance)
    assert found is not None
    assert tried > 250
    assert found.simulated.total_s == pytest.approx(best, rel=SAME)
    assert search.bound_s == pytest.approx(best, rel=SAME), "all placements were tried"


def test_what_fits_nowhere_has_no_plan() -> None:
    for seed in (5, 6):
        instance = random_instance(seed)
        assert brute_force(instance) == (None, 0)
        assert instance.solved() is None


def test_most_small_jobs_have_a_plan() -> None:
    assert sum(random_instance(seed).solved() is not None for seed in range(20)) > 12


def test_more_of_anything_is_never_slower() -> None:
    chance = random.Random(3)
    for seed in range(25):
        instance, change = random_instance(seed), chance.choice(CHANGES)
        before, after = instance.solved(), more_of(instance, change).solved()
        if before is not None:
            assert after is not None
            assert after.simulated.total_s <= before.simulated.total_s * (1 + SAME)


def test_what_is_left_unproven_of_larger_jobs_is_little() -> None:
    gaps = []
    for seed in (1, 3, 7, 15):
        search = larger_instance(seed).search()
        found = search.run()
        if found is not None:
            gaps.append(1 - search.bound_s / found.simulated.total_s)
    assert len(gaps) >= 3
    assert statistics.median(gaps) < 0.01
    assert max(gaps) < 0.05


def test_duals_are_what_a_little_more_gives() -> None:
    off = [one for one in (off_by(larger_instance(seed)) for seed in range(5)) if one is not None]
    assert len(off) >= 3
    assert max(off) < 0.02
