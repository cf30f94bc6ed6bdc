"""The time of a whole job from its first tokens: first steps as measured, later ones from the cost per step, growth fitted.

FlexGen's projection takes the mean of the measured steps for all later ones, as if keys and values did not grow. Here a step costs
a + c · (tokens attended to), so that it grows by c with every step; c is the lower end of the confidence interval of the measured
steps' least-squares slope: noise is not taken for growth (what is so missed is little: where attention is much of a step, the prompts are
long, and a few tokens more are few). It is never more than what makes attention all of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit

WARM_UP_STEPS = 1
"""Left out of the fit where at least four others are there: kernels are chosen and buffers are made in the first."""
LEAST_STEPS, SURE = 4, 0.999
"""Steps that a slope is taken from at least; one-sided confidence that it is as large."""


def decode_seconds(step_s: Sequence[float], num_steps: int, mean_length: float) -> float:
    """Seconds of `num_steps` decode steps, of which the first were measured.

    Args:
        step_s: seconds of the measured ones, in order.
        mean_length: tokens of a prompt, in the mean.
    """
    measured = list(step_s[:num_steps])
    rest = num_steps - len(measured)
    if rest <= 0 or not measured:
        return sum(measured)
    fitted = measured[WARM_UP_STEPS:] if len(measured) >= LEAST_STEPS + WARM_UP_STEPS else measured
    middle, growth = statistics.median(fitted), growth_per_step(fitted, mean_length + len(measured) - len(fitted))
    centre = len(measured) - (len(fitted) + 1) / 2  # the place of the fitted steps' middle, from 0
    later = sum(middle + growth * (step - centre) for step in range(len(measured), num_steps))
    return sum(measured) + later


def growth_per_step(step_s: Sequence[float], length_before: float) -> float:
    """Seconds that a step takes longer than the one before it.

    Args:
        length_before: tokens attended to in the first of these steps, in the mean.
    """
    n = len(step_s)
    if n < LEAST_STEPS:
        return 0.0
    mean_at, mean = (n - 1) / 2, statistics.fmean(step_s)
    spread = sum((at - mean_at) ** 2 for at in range(n))
    slope = sum((at - mean_at) * (seconds - mean) for at, seconds in enumerate(step_s)) / spread
    left = sum((seconds - mean - slope * (at - mean_at)) ** 2 for at, seconds in enumerate(step_s))
    error = math.sqrt(left / (n - 2) / spread)
    return min(max(0.0, slope - float(stdtrit(n - 2, SURE)) * error), mean / (length_before + mean_at))
