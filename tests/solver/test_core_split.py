"""Cores shared by looking at every assignment, by hand and against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload_solver.core_split import (
    CoreWork,
    Speedup,
    attention_graph,
    best_split,
    default_split,
    levels_of,
    slowest_s,
    widest_level,
)


def test_levels_of_a_graph() -> None:
    assert levels_of({"q": [], "k": [], "scores": ["q", "k"], "out": ["scores"]}) == [["k", "q"], ["scores"], ["out"]]
    assert widest_level(attention_graph(5)) == 5
    with pytest.raises(ValueError, match="circle"):
        levels_of({"a": ["b"], "b": ["a"]})


def test_speedups() -> None:
    measured = Speedup({1: 1.0, 4: 3.0})
    assert [measured.at(n) for n in (1, 2, 4, 9)] == pytest.approx([1, 1 + 2 / 3, 3, 3])
    assert Speedup().at(1) == pytest.approx(1)


def test_streams_beat_threads_where_a_stream_does_not_scale() -> None:
    """8 cores; attention gets 1.5 times as fast with 2 threads and no faster with more: six streams of one thread do 6 times the work."""
    work = CoreWork(seconds={"host_attention": 12.0, "disk_io": 1.0, "staging": 0.5}, most_streams=6)
    flat = {"host_attention": Speedup({1: 1.0, 2: 1.5, 8: 1.5})}
    found = best_split(work, flat, 8)
    assert (found.streams, found.threads["host_attention"]) == (6, 1)
    assert found.slowest_s == pytest.approx(2.0)
    assert found.totals()["host_attention"] == 6
    assert sum(found.totals().values()) <= 8
    assert default_split(work, flat, 8).slowest_s > found.slowest_s


@given(st.integers(1, 6), st.integers(1, 3), st.tuples(*[st.floats(0.1, 10)] * 3))
@settings(max_examples=60, deadline=None)
def test_exact_over_the_domain(cores: int, streams: int, seconds: tuple[float, float, float]) -> None:
    names = ("host_attention", "disk_io", "staging")
    work = CoreWork(seconds=dict(zip(names, seconds, strict=True)), most_streams=streams)
    found = best_split(work, {}, cores)
    if cores < 3:
        assert set(found.threads.values()) == {1}
        return
    best = min(
        slowest_s(work, {}, p, dict(zip(names, threads, strict=True)))
        for p in range(1, streams + 1)
        for threads in itertools.product(range(1, cores + 1), repeat=3)
        if p * threads[0] + threads[1] + threads[2] <= cores
    )
    assert found.slowest_s == pytest.approx(best)
