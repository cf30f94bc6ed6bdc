"""Quantization: weights to int8 or int4 in groups along K, in the layout of `tiled`.

By rounding to the nearest, scales are rounded up and minima down to fp16, so that no weight falls outside the codes: the error of a weight
is at most half its group's scale, plus one rounding of fp32. For int8, scale = max |w| / 127; for int4, scale = (max - min) / 15; both
less than 2^-10 (or, below the normal numbers of fp16, 2^-24) larger, and the range of int4 by as much of its minimum. Where it is known
how much each column counts, int4 is fitted to that instead (`fit`), and its outermost weights may be clipped.
"""

from __future__ import annotations

import torch

from lmoffload.kernels.fit import fit, nearest_codes
from lmoffload.kernels.tiled import Codes, pack
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED

LARGEST = 65504.0
"""The largest number of fp16, which holds scales and minima."""

MOST_INT8 = 127
MOST_INT4 = 15


def quantize(weights: torch.Tensor, format_name: str, squares: torch.Tensor | None = None) -> torch.Tensor:
    """Weights fp32 [n, k] as stored bytes, uint8 [n * row_bytes]; k is a multiple of the format's group.

    Args:
        squares: mean square of what each column is multiplied with, fp32 [k]; int8 has no need of it.

    Raises:
        StatedError: a weight is not finite, or so large that fp16 cannot hold its group's scale or minimum.
    """
    groups = weights.reshape(weights.shape[0], -1, QUANTIZED[format_name].block_elements)
    parts = _symmetric(groups) if format_name == "int8" else _asymmetric(groups) if squares is None else _fitted(groups, squares)
    return pack(parts, format_name)


def dequantize(parts: Codes) -> torch.Tensor:
    """fp32 [n, k]: scale * code (+ minimum), rounded once."""
    n, groups = parts.scales.shape
    codes = parts.codes.view(n, groups, -1).float()
    wide = codes * parts.scales.float()[..., None]  # exact: 11 bits by 8
    if parts.minima is not None:
        wide += parts.minima.float()[..., None]
    return wide.view(n, -1)


def _symmetric(groups: torch.Tensor) -> Codes:
    size = groups.abs().amax(dim=2)
    _check(size, size, MOST_INT8 * LARGEST)
    scales = _rounded(size / MOST_INT8, up=True)
    codes = (groups * _inverse(scales)[..., None]).round_().clamp_(-MOST_INT8, MOST_INT8)
    return Codes(codes.to(torch.int8).flatten(1), scales, None)


def _asymmetric(groups: torch.Tensor) -> Codes:
    low, high = groups.aminmax(dim=2)
    _check(low, high, LARGEST)
    minima = _rounded(low, up=False)
    scales = _rounded((high - minima.float()) / MOST_INT4, up=True)
    codes = groups.sub(minima.float()[..., None]).mul_(_inverse(scales)[..., None]).round_().clamp_(0, MOST_INT4)
    return Codes(codes.to(torch.uint8).flatten(1), scales, minima)


def _fitted(groups: torch.Tensor, squares: torch.Tensor) -> Codes:
    low, high = groups.aminmax(dim=2)
    _check(low, high, LARGEST)
    scales, minima = fit(groups, squares.view(groups.shape[1:]))
    return Codes(nearest_codes(groups, scales, minima).to(torch.uint8).flatten(1), scales, minima)


def _check(low: torch.Tensor, high: torch.Tensor, most: float) -> None:
    if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise StatedError("it holds weights that are not finite numbers")
    if max(float(low.abs().max()), float(high.abs().max())) > most:
        raise StatedError(f"it holds weights larger than {most:.0f}, which the format cannot scale")


def _rounded(values: torch.Tensor, *, up: bool) -> torch.Tensor:
    """To fp16 towards plus (`up`) or minus infinity."""
    half = values.half()
    wrong = half.float() < values if up else half.float() > values
    toward = torch.tensor(float("inf") if up else float("-inf"), dtype=torch.float16)
    stepped = torch.nextafter(half, toward)
    return torch.where(wrong, stepped, half).clamp_(-LARGEST, LARGEST)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float()
    return torch.where(wide > 0, 1 / wide, torch.zeros_like(wide))
