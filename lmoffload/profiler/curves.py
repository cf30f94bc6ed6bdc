"""Curves from samples, and the law time = latency + amount / rate fitted to them where it holds."""

from __future__ import annotations

from collections.abc import Sequence

from lmoffload.profiler.samples import UNSTEADY, Sample
from lmoffload_solver.machine import Curve, Fit

HOLDS = 0.15
"""A law is kept when the root mean square of its relative errors is below this."""
LEAST_POINTS = 3


def curve_of(x: Sequence[float], amounts: Sequence[float], samples: Sequence[Sample], *, law: bool = False) -> Curve:
    """The rate amounts / time against x; with `law`, fitted over the amounts where the law holds."""
    rates = tuple(amount / sample.median_s for amount, sample in zip(amounts, samples, strict=True))
    spread = tuple(sample.spread for sample in samples)
    fit = fit_latency_plus_rate(amounts, [sample.median_s for sample in samples]) if law else None
    return Curve(x=tuple(x), y=rates, spread=spread, unsteady=any(s > UNSTEADY for s in spread), fit=fit)


def fit_latency_plus_rate(amounts: Sequence[float], times_s: Sequence[float]) -> Fit | None:
    """Fit time = latency_s + amount / rate_per_s.

    Returns:
        The fit with its residual, or None when there are fewer than three points or the law does not hold (residual >= 0.15).
    """
    if len(amounts) < LEAST_POINTS:
        return None
    latency_s, seconds_per_unit, residual = least_squares(amounts, times_s)
    if residual >= HOLDS or seconds_per_unit <= 0:
        return None
    return Fit(latency_s=latency_s, rate_per_s=1 / seconds_per_unit, residual=residual)


def least_squares(amounts: Sequence[float], times_s: Sequence[float]) -> tuple[float, float, float]:
    """(latency_s, seconds per unit, root mean square of the relative errors) of the line that minimises the last; both are at least 0."""
    import numpy as np
    from scipy.optimize import lsq_linear

    amount, measured = np.asarray(amounts, float), np.asarray(times_s, float)
    # In relative errors the law is linear in (latency, seconds per unit): both columns are divided by the measured time. Each is scaled
    # to about 1, since seconds per byte are some ten orders of magnitude below seconds.
    scale = np.array([measured.min(), (measured / amount).min()])
    design = np.stack([np.ones_like(amount), amount], axis=1) * scale / measured[:, None]
    solution = lsq_linear(design, np.ones_like(amount), bounds=(0, np.inf))
    residual = float(np.sqrt(np.mean((design @ solution.x - 1) ** 2)))
    latency_s, seconds_per_unit = solution.x * scale
    return float(latency_s), float(seconds_per_unit), residual
