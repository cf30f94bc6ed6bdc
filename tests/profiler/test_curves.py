"""Samples, and laws fitted to them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload.profiler.curves import curve_of, fit_latency_plus_rate
from lmoffload.profiler.disk_rates import stream_sample
from lmoffload.profiler.samples import Sample, repeat, summarize

SIZES = [float(65536 << i) for i in range(11)]


@settings(deadline=None)  # the first call loads scipy
@given(latency=st.floats(1e-6, 1e-1), rate=st.floats(1e6, 1e11))
def test_a_known_law_is_found(latency: float, rate: float) -> None:
    fit = fit_latency_plus_rate(SIZES, [latency + size / rate for size in SIZES])
    assert fit is not None
    assert fit.residual < 1e-3
    for size in SIZES:
        assert fit.latency_s + size / fit.rate_per_s == pytest.approx(latency + size / rate, rel=0.01)


def test_no_law_no_fit() -> None:
    assert fit_latency_plus_rate(SIZES, [size**2 / 1e15 for size in SIZES]) is None
    assert fit_latency_plus_rate(SIZES, [1.0 if i % 2 else 3.0 for i in range(11)]) is None
    assert fit_latency_plus_rate(SIZES[:2], [1.0, 2.0]) is None


def test_median_and_spread() -> None:
    sample = summarize([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (sample.median_s, sample.spread, sample.count) == (6.0, pytest.approx(8 / 6), 11)
    assert sample.unsteady


def test_repeat_drops_its_warm_up_and_ends() -> None:
    calls: list[int] = []
    assert repeat(lambda: calls.append(1), 0.0, warmups=2, at_least=4).count == 4
    assert len(calls) == 6
    assert repeat(lambda: None, 10.0, at_most=7).count == 7


def test_a_curve_is_marked_unsteady_by_one_point() -> None:
    steady, unsteady = Sample(2.0, 0.1, 3), Sample(4.0, 0.3, 3)
    curve = curve_of([1, 2], [10.0, 10.0], [steady, unsteady])
    assert (curve.y, curve.unsteady, curve.fit) == ((5.0, 2.5), True, None)


def test_a_limit_that_lets_requests_through_in_bursts_is_seen_at_its_rate() -> None:
    """100 requests a second, ten at once every tenth of a second, after a burst of 50 for nothing."""
    ended_s = [0.001 * i for i in range(50)] + [0.1 * (i // 10) + 0.002 * (i % 10) for i in range(10, 200)]
    sample = stream_sample(ended_s, 2)
    assert sample.median_s == pytest.approx(0.01, rel=0.05)


def test_an_even_stream() -> None:
    sample = stream_sample([0.02 * (i + 1) for i in range(60)], 4)
    assert sample.median_s == pytest.approx(0.02, rel=1e-6)
    assert sample.spread < 1e-6
