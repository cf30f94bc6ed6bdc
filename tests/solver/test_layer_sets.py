"""Sets of a layer's matrices: what bounds them, and the mixes that are placed."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from lmoffload_solver.in_turn import between
from lmoffload_solver.layer_sets import _hull
from tests.solver.host_instances import deeper_instance, every_candidate, larger_instance


def test_the_best_of_two_sets_by_hand() -> None:
    sizes, seconds = np.array([0.0, 2.0, 3.0]), np.array([0.0, 2.0, 9.0])
    assert between(sizes, seconds, 2.5) == (1, 2, pytest.approx(5.5)), "0 and 3 would take 7.5"
    assert between(sizes, np.array([0.0, 8.0, 9.0]), 2.5) == (0, 2, pytest.approx(7.5)), "2 and 3 would take 8.5"
    assert between(sizes, seconds, 2.0)[2] == 2
    assert between(sizes, seconds, 3.0)[1:] == (2, 9)
    assert between(sizes[1:], np.array([5.0, 4.0]), 2.0) == (1, 1, 4), "more bytes in less time"


def test_the_hull_by_hand() -> None:
    xs, ys = _hull(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 5.0, 2.0, 6.0]))
    assert (xs.tolist(), ys.tolist()) == ([0, 2, 3], [0, 2, 6])


@pytest.mark.parametrize("seed", range(8))
def test_no_placement_goes_below_the_bound(seed: int) -> None:
    """All placements of some candidates, of those in which something streams, of jobs of two to four layers."""
    chance = random.Random(seed)
    instance = deeper_instance(seed)
    every = every_candidate(instance.prices, instance.domain, instance.offered)
    known = [(evaluator, candidate) for evaluator, candidate in every if evaluator.has_mixes(candidate)]
    candidates = [(e, candidate) for e, candidate in known if any(mix.high.aligned for mix in e.mixes(candidate))]
    for evaluator, candidate in chance.sample(candidates, min(6, len(candidates))):
        rounding, depth = evaluator.roundings[candidate.stream], candidate.prefetch_depth
        best = float("inf")
        for head, table in product((True, False), repeat=2):
            if (evaluator.model.tied_head and head != table) or not evaluator.kv_fits_disk(candidate):
                continue
            for layers in product(rounding.ladders[0].every, repeat=evaluator.model.num_layers):
                placement = rounding.placed(layers, depth, head, table)
                if placement.memory_bytes <= evaluator.room(candidate, head) and placement.slots in (0, depth + 1):
                    best = min(best, evaluator.simulate(candidate, placement).total_s)
        assert min((mix.bound_s for mix in evaluator.mixes(candidate)), default=float("inf")) <= best * (1 + 1e-9)


def test_plans_of_larger_jobs_are_near_their_bound() -> None:
    """With one and two buffers, keys and values in memory and on the disk."""
    seen = set()
    for seed in (14, 25, 28, 32):
        search = larger_instance(seed).search()
        found = search.run()
        assert found is not None
        candidate, evaluator = found.candidate, search.evaluator(found.candidate.variant)
        assert evaluator.has_mixes(candidate)
        assert all(p.memory_bytes <= evaluator.room(candidate, p.head_at_home) for p in evaluator.placements(candidate))
        assert search.tightened(candidate) == pytest.approx(found.simulated.total_s, rel=0.01)
        seen.add((candidate.prefetch_depth, candidate.kv_on_disk > 0))
    assert len(seen) > 2
