"""Quantization: layout and codes worked out by hand, error within half a scale, small memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.quantize import dequantize, quantize
from lmoffload.kernels.tiled import Codes, pack, padded_tail, taken, unpack
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import QUANTIZED, stored_bytes


def bound(weights: torch.Tensor, parts: Codes) -> torch.Tensor:
    """Half a scale, and fp32 rounding."""
    size = group_size(parts)
    least = torch.zeros_like(parts.scales) if parts.minima is None else parts.minima
    half = (parts.scales.float() * (0.5 + 1e-5) + least.float().abs() * 2.0**-22).repeat_interleave(size, dim=1)
    return half + weights.abs() * 2.0**-22


def group_size(parts: Codes) -> int:
    return parts.codes.shape[1] // parts.scales.shape[1]


def widened(weights: torch.Tensor, format_name: str) -> torch.Tensor:
    return reference_widen(Matrix(quantize(weights, format_name), format_name, *weights.shape))


def test_int8_by_hand():
    weights = torch.zeros(1, 64)
    weights[0, :4] = torch.tensor([127.0, -127.0, 1.4, -0.6])
    data = quantize(weights, "int8")
    assert data.tolist() == [0x00, 0x3C, 127, 129, 1, 255, *[0] * 60]  # the scale 1.0 in fp16, then signed codes
    assert widened(weights, "int8")[0, :4].tolist() == [127.0, -127.0, 1.0, -1.0]


def test_int4_by_hand():
    weights = torch.arange(32.0).remainder(16).view(1, 32) * 2 - 10  # scale 2, minimum -10, codes 0..15 twice
    data = quantize(weights, "int4-g32")
    low = [0x00, 0x40, 0x00, 0xC9]
    assert data.tolist() == [*low, *[c | (c + 4) << 4 for c in (0, 1, 2, 3, 8, 9, 10, 11)] * 2]
    assert torch.equal(widened(weights, "int4-g32"), weights)


def test_rows_of_a_tile_are_interleaved():
    codes = torch.arange(18 * 64).view(18, 64).remainder(100).to(torch.int8)
    data = pack(Codes(codes, torch.ones(18, 1, dtype=torch.float16), None), "int8")
    first, last = data[: 16 * 66], data[16 * 66 :]
    assert first[32 : 32 + 8].tolist() == [*codes[0, :4].tolist(), *codes[1, :4].tolist()]
    assert first[32 + 64 : 32 + 68].tolist() == codes[0, 4:8].tolist()
    assert last[4:16].tolist() == [*codes[16, :4].tolist(), *codes[17, :4].tolist(), *codes[16, 4:8].tolist()]


@pytest.mark.parametrize("format_name", QUANTIZED)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 50])
def test_pack_and_unpack_are_inverse(format_name, n):
    k = 3 * QUANTIZED[format_name].block_elements
    data = torch.randint(0, 256, (stored_bytes((n, k), format_name),), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    assert torch.equal(pack(unpack(data, format_name, n, k), format_name), data)
    if n % 16:
        whole = torch.cat((data[: n // 16 * 16 * (data.numel() // n)], padded_tail(data, format_name, n, k)))
        padded = unpack(whole, format_name, (n + 15) // 16 * 16, k)
        assert torch.equal(padded.codes[:n], unpack(data, format_name, n, k).codes)
        assert not padded.codes[n:].any() and not padded.scales[n:].any()


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_rows_are_taken_from_their_tiles(format_name):
    weights = torch.randn(50, 3 * QUANTIZED[format_name].block_elements, generator=torch.Generator().manual_seed(1))
    data, k, rows = quantize(weights, format_name), weights.shape[1], torch.tensor([49, 0, 17, 17, 48, 15])
    whole = torch.cat((data[: 48 * (data.numel() // 50)], padded_tail(data, format_name, 50, k)))
    expected = reference_widen(Matrix(data, format_name, 50, k))[rows]
    assert torch.equal(dequantize(taken(whole, format_name, k, rows)), expected)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(QUANTIZED)), st.floats(-7, 4), st.floats(-3, 3), st.integers(0, 2**31))
def test_error_is_at_most_half_a_scale(format_name, log_size, offset, seed):
    size, k = 10.0**log_size, 2 * QUANTIZED[format_name].block_elements
    weights = (torch.randn(20, k, generator=torch.Generator().manual_seed(seed)) + offset) * size
    parts = unpack(quantize(weights, format_name), format_name, *weights.shape)
    assert ((widened(weights, format_name) - weights).abs() <= bound(weights, parts)).all()
    groups = weights.view(20, 2, -1)
    span = groups.abs().amax(2) / 127 if format_name == "int8" else (groups.amax(2) - groups.amin(2)) / 15
    largest = span * (1 + 2.0**-9) + groups.abs().amax(2) * 2.0**-10 / 15 + 2.0**-23
    assert (parts.scales.float() <= largest).all()


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_extreme_groups(format_name):
    k = QUANTIZED[format_name].block_elements
    weights = torch.stack([torch.zeros(k), torch.full((k,), 0.3), torch.full((k,), -5e4), torch.eye(1, k)[0] * 6e4, torch.full((k,), 1e-9)])
    parts = unpack(quantize(weights, format_name), format_name, *weights.shape)
    wide = widened(weights, format_name)
    assert wide.isfinite().all() and (wide[0] == 0).all()
    assert ((wide - weights).abs() <= bound(weights, parts)).all()


def test_weights_that_no_format_holds_are_refused():
    for value, words in ((float("nan"), "finite"), (float("inf"), "finite"), (1e5, "larger")):
        with pytest.raises(StatedError, match=words):
            quantize(torch.full((1, 64), value), "int4-g64")
