"""Whole tensors: within the budget, spread evenly, and exactly what the schedule then makes of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload_solver import counting
from lmoffload_solver.memory import placeable
from lmoffload_solver.outcome import Optimal
from lmoffload_solver.rounding import Placement, Rounding, Stream
from lmoffload_solver.schedule import aligned_bytes, num_slots, slot_bytes, units_of
from lmoffload_solver.search import solve
from lmoffload_solver.workload import Limits
from tests.solver.toys import make_machine, make_model, make_work

LAYER = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)


def test_everything_at_home_where_it_fits() -> None:
    model = make_model()
    total = sum(aligned_bytes(counting.tensor_bytes(model.by_name[name])) for name in placeable(model))
    (best, *_) = Rounding(model).placements(total, 2, True)
    assert (best.streamed_bytes, best.slots, best.memory_bytes) == (0, 0, total)
    assert all(p.streamed_bytes > 0 or not p.embedding_at_home for p in Rounding(model).placements(total - 1, 2, True))


def test_least_is_a_single_buffer() -> None:
    least = Rounding(make_model()).least()
    assert least.slots == 1
    assert not least.head_at_home
    # One of the toy's seven matrices takes its size and the page more that an unlucky offset costs.
    assert least.memory_bytes == sum(aligned_bytes(size) for size in (16384, 8192, 8192, 16384, 32768, 32768, 32768))


def test_matrices_one_by_one_need_the_largest_alone() -> None:
    least = Rounding(make_model(), "matrix").least()
    assert least.memory_bytes == aligned_bytes(32768)
    # The first matrix begins the layer; the six others begin parts of their own.
    assert [part.computes for part in least.layers[0].parts] == [(i,) for i in range(7)]
    assert sum(least.streams) == 4 * 7 + 2, "the head is cut into pieces of the largest matrix"


def test_a_resident_matrix_belongs_to_the_part_before_it() -> None:
    ladder = Rounding(make_model(), "matrix").ladders[0]
    (level,) = [level for level in ladder.levels if level.aligned == aligned_bytes(8192) + aligned_bytes(32768)]
    first, second = sorted(level.places)
    assert [part.computes for part in level.parts] == [tuple(range(second)), tuple(range(second, 7))]
    assert (first, second) == (2, 6)
    assert [part.stored for part in level.parts] == [8192, 32768]
    assert level.slot == aligned_bytes(32768)


def test_head_is_cut_as_the_schedule_cuts_it() -> None:
    rounding = Rounding(make_model(vocab=1000))
    assert rounding._pieces(LAYER, head_at_home=False) == (576 * 256, 424 * 256)
    assert rounding._pieces(0, head_at_home=False) == (1000 * 256,)
    assert rounding._pieces(LAYER, head_at_home=True) == (0,)


@settings(deadline=None)
@given(
    st.integers(0, 5_000_000),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.integers(1, 12),
    st.sampled_from(["layer", "matrix"]),
)
def test_placements_fit_and_are_even(budget: int, depth: int, head_at_home: bool, tied: bool, num_layers: int, stream: Stream) -> None:
    model = make_model(num_layers, hidden=128, tied=tied)
    rounding = Rounding(model, stream)
    for placement in rounding.placements(budget, depth, head_at_home):
        assert placement.memory_bytes <= budget
        assert placement.head_at_home == head_at_home
        assert_even(placement, depth)


def assert_even(placement: Placement, depth: int) -> None:
    """Any window of layers streams its even share, give or take one matrix more than it must."""
    streamed = [level.aligned for level in placement.layers]
    most, mean = max(streamed), sum(streamed) / len(streamed)
    assert all(0 <= size <= most for size in streamed)
    for width in range(1, depth + 2):
        for first in range(len(streamed) - width + 1):
            assert abs(sum(streamed[first : first + width]) - width * mean) <= most + 1


def test_a_budget_between_two_sets_alternates() -> None:
    """Ten layers of which half must lose one more matrix: the two sets alternate, they do not lie in two runs."""
    model = make_model(10, hidden=256, intermediate=256)
    rounding = Rounding(model)
    ladder = rounding.ladders[0]
    low, high = ladder.levels[-3], ladder.levels[-2]
    budget = rounding.layers_aligned - 5 * (low.aligned + high.aligned) + 2 * high.aligned
    placement = rounding._fill(budget, 1, high.aligned, False, False)
    assert placement.memory_bytes <= budget
    sizes = [level.aligned for level in placement.layers]
    assert sizes.count(low.aligned) == sizes.count(high.aligned) == 5
    assert all(a != b for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_the_schedule_streams_what_was_placed(tied: bool, stored: str, share: float) -> None:
    model = make_model(8, 256, 512, vocab=2000, stored=stored, tied=tied)
    outcome = solve(model, make_machine(), make_work(), Limits(weights_memory_share=share))
    assert isinstance(outcome, Optimal)
    plan = outcome.plan
    assert plan.stream == ("matrix" if share == 0.1 else "layer")
    units = units_of(model, plan)
    rounding = Rounding(model, plan.stream)
    on_disk = {name for name, t in plan.weights.tensors.items() if t.tier == "disk"}
    streamed = sum(counting.tensor_bytes(model.by_name[n]) for n in on_disk if n != model.embedding.name or tied)
    assert counting.moved_bytes(units) == streamed
    ring = num_slots(units, plan.prefetch_depth) * slot_bytes(units) if streamed else 0
    home = sum(counting.tensor_bytes(t) for t in model.tensors if t.name not in on_disk)
    assert home + ring <= share * counting.weights_bytes(model)
    assert rounding.head_bytes == counting.tensor_bytes(model.head)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_far_larger_than_the_layers_fits_every_budget_above_the_least(tied: bool) -> None:
    """Where the layers fit at home and the head does not, its pieces must not outgrow what is left."""
    model = make_model(num_layers=2, vocab=100_000, tied=tied)
    total = counting.weights_bytes(model)
    least = min(Rounding(model, stream).least().memory_bytes for stream in ("layer", "matrix"))
    work, before = make_work(2, 8, 4), 0.0
    for budget in (2 * least, *(total * percent // 100 for percent in (2, 10, 49, 60, 100)), 2 * total):
        outcome = solve(model, make_machine(), work, Limits(weights_memory_bytes=budget))
        assert isinstance(outcome, Optimal), budget
        sizes, units = outcome.plan.weights, units_of(model, outcome.plan)
        slots = num_slots(units, outcome.plan.prefetch_depth)
        ring = slots * slot_bytes(units) if slots else 0
        at_home = sum(counting.tensor_bytes(model.by_name[n]) for n in placeable(model) if sizes.tensors[n].tier == "host")
        assert at_home + ring <= budget
        assert outcome.plan.predicted.tokens_per_s >= 0.95 * before, "more memory is not slower, but for whole tensors"
        before = outcome.plan.predicted.tokens_per_s
