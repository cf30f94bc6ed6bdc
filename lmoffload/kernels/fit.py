"""Scales and minima of int4 groups that lose least where it matters: weighted least squares, as k-quants of llama.cpp do.

A product's error is, to first order, the sum over columns of E[x^2] times the weight's squared error, so columns are weighted by the mean
square of what they are multiplied with. For codes c of a group, scale and minimum are the weighted regression of the weights on c; for a
scale and a minimum, codes are the nearest. The two are taken in turn from several starts: the whole range, and shrunk ones, which clip.
"""

from __future__ import annotations

import torch

MOST_CODE = 15
STARTS = (1.0, 0.85)
"""Shares of a group's range."""
TURNS = 2
"""Regressions from each start."""

LEAST_SHARE = 1e-4
"""A column counts for at least this share of the mean: the calibration text may not have touched it."""


def fit(groups: torch.Tensor, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, minima), fp16 [n, G], of groups fp32 [n, G, g] whose columns have the mean squares fp32 [G, g].

    What is tried is tried as fp16 holds it, and the whole range is among it: never worse than rounding to the nearest of that.
    """
    weights = _counting(squares)
    total, mean = weights.sum(-1), (groups * weights).sum(-1) / weights.sum(-1)
    low, high = groups.aminmax(dim=-1)
    centred = groups - mean[..., None]
    best_scale = best_least = best_error = None
    for share in STARTS:
        least, scale = low * share, (high - low) * (share / MOST_CODE)
        for turn in range(TURNS + 1):
            half_scale, half_least = scale.half(), least.half()
            codes = nearest_codes(groups, half_scale, half_least)
            wide = codes * half_scale.float()[..., None] + half_least.float()[..., None]
            error = wide.sub_(groups).square_().mul_(weights).sum(-1)
            if best_scale is None or best_least is None or best_error is None:
                best_scale, best_least, best_error = half_scale, half_least, error
            else:
                better = error < best_error
                best_scale = torch.where(better, half_scale, best_scale)
                best_least = torch.where(better, half_least, best_least)
                best_error = torch.where(better, error, best_error)
            if turn < TURNS:
                scale, least = _regression(codes, centred, mean, weights, total)
    assert best_scale is not None and best_least is not None, "there is a start"
    return best_scale, best_least


def nearest_codes(groups: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 as fp32 [n, G, g]; 0 where a scale is 0."""
    wide = scales.float()
    inverse = torch.where(wide > 0, 1 / wide, torch.zeros_like(wide))
    return groups.sub(minima.float()[..., None]).mul_(inverse[..., None]).round_().clamp_(0, MOST_CODE)


def _counting(squares: torch.Tensor) -> torch.Tensor:
    mean = squares.mean(-1, keepdim=True)
    return torch.where(mean > 0, squares.clamp(min=LEAST_SHARE * mean) / mean, torch.ones_like(squares))


def _regression(
    codes: torch.Tensor, centred: torch.Tensor, mean: torch.Tensor, weights: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum that fit weights = scale * code + minimum best; (0, mean) where all codes are one."""
    weighted = codes * weights
    middle = weighted.sum(-1) / total
    spread = weighted.mul(codes).sum(-1) - total * middle.square()
    scale = (weighted * centred).sum(-1) / spread.clamp(min=1e-12)
    scale = torch.where(spread > 1e-6 * total, scale.clamp(min=0), torch.zeros_like(scale))
    return scale, mean - scale * middle
