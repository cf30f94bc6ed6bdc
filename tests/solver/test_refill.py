"""How many places waiting prompts take at once: by hand, and against a walk of what the formula simplifies."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from lmoffload_solver.refill import best_places
from lmoffload_solver.search import Optimal, solve
from lmoffload_solver.workload import Limits
from tests.solver.toys import MIB, make_machine, make_model, make_work


def test_by_hand() -> None:
    """Two places, 10 steps, 0.5 s: one at once costs F a row, both (F + 5) / 2. Three: F, (F + 5/2) / 2, (F + 5/2 + 10) / 3."""
    assert [best_places(2, 10, 0.5, join_s) for join_s in (0.0, 4.9, 5.1)] == [1, 1, 2]
    assert [best_places(3, 10, 0.5, join_s) for join_s in (2.4, 2.6, 17.4, 17.6)] == [1, 2, 2, 3]
    assert best_places(50, 100, 0.0, 1.0) == 50, "idle places that cost nothing may wait"


def walked_s(places: int, step_s: float, join_s: float, lengths: Iterator[int], taken: int, rows: int = 1500) -> float:
    """Seconds of `rows` completions in one micro-batch whose steps cost `step_s` each, and `join_s` more where prompts come in."""
    left, waiting, seconds = [0] * places, rows, 0.0
    while True:
        free = [place for place in range(places) if left[place] == 0]
        if waiting and len(free) >= min(taken, waiting):
            for place in free[:waiting]:
                left[place] = next(lengths)
            waiting -= min(waiting, len(free))
            seconds += join_s
        if not any(left):
            return seconds
        seconds += step_s
        left = [max(0, steps - 1) for steps in left]


@pytest.mark.parametrize(("places", "num_steps", "join_s"), [(8, 64, 0.0), (32, 64, 1.0), (32, 200, 3.0), (64, 32, 5.0)])
def test_no_other_number_is_much_better(places: int, num_steps: int, join_s: float) -> None:
    """Completions of geometric lengths with this mean, steps of 1 s."""

    def lengths() -> Iterator[int]:
        chance = random.Random(3)
        while True:
            yield 1 + int(chance.expovariate(1 / (num_steps - 0.5)))

    chosen = best_places(places, num_steps, 1.0 / places, join_s)
    seconds = {taken: walked_s(places, 1.0, join_s, lengths(), taken) for taken in {*range(1, places, 3), chosen, places}}
    assert seconds[chosen] < 1.03 * min(seconds.values()), (chosen, min(seconds, key=lambda taken: seconds[taken]))
    assert seconds[places] > 1.5 * seconds[chosen], "waiting until all have finished costs much more"


def test_the_planner_lets_prompts_in_at_once_where_reading_hides_them() -> None:
    model, work = make_model(4), make_work(count=64, length=16, gen_len=32)
    limits = Limits(micro_batch=8, num_micro_batches=2, weights_memory_share=0.5)
    slow = solve(model, make_machine(disk_bytes_per_s=1e6), work, limits)
    assert isinstance(slow, Optimal) and slow.plan.refill == 1
    resident = solve(model, make_machine(256 * MIB), work, Limits(micro_batch=8, num_micro_batches=2))
    assert isinstance(resident, Optimal) and resident.plan.refill is not None and 1 < resident.plan.refill <= 8
