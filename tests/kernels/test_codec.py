"""Quantized lines: the kernel's bits are the reference's, and a number is off by at most half a scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload.kernels.codec import CODECS, encode_lines, reference_decode, reference_encode, unpack_codes
from lmoffload_solver.formats import PARAMETER_BYTES

ADVERSARIAL = (0.0, 1.0, -1.0, 1e38, -3e38, 3e38, 1e-30, 1e-38, 200.0, 65504.0)


def encoded(x, name, pool=None):
    """(codes, parameters) as the kernel stores them, lines in reverse."""
    count, size = x.shape[0], CODECS[name].line_bytes
    target, places = torch.full((count * (size + PARAMETER_BYTES),), 255, dtype=torch.uint8), torch.arange(count).flip(0)
    encode_lines(x, name, target, places * size, count * size + places * PARAMETER_BYTES, pool)
    codes, parameters = target[: count * size].view(count, size), target[count * size :].view(torch.int32)
    return unpack_codes(codes, name).flip(0), parameters.flip(0)


def lines():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 32, generator=generator) * torch.randn(20_000, 1, generator=generator).mul(5).exp()
    x += 50 * torch.randn(20_000, 1, generator=generator) * (torch.rand(20_000, 1, generator=generator) < 0.3)
    for i, number in enumerate(ADVERSARIAL):
        x[3 * i], x[3 * i + 1], x[3 * i + 2, 5] = number, number * x[3 * i + 1].sign(), number
    return x


@pytest.mark.parametrize("name", CODECS)
def test_the_kernel_is_the_reference(name, pool):
    x = lines()
    codes, parameters = encoded(x, name, pool)
    expected = reference_encode(x, name)
    assert torch.equal(codes, expected[0]) and torch.equal(parameters, expected[1])
    assert all(torch.equal(*pair) for pair in zip(encoded(x[7:9].contiguous(), name), (codes[7:9], parameters[7:9]), strict=True))


@pytest.mark.parametrize("name", CODECS)
def test_half_a_scale(name):
    x = lines().double()
    codes, parameters = encoded(x.float(), name)
    scale = (parameters << 16).view(torch.float32).double()
    wide = reference_decode(codes, parameters).double()
    large = x.abs().amax(1) >= 2.0**-100
    levels = CODECS[name].levels
    wanted = torch.maximum((x.amax(1) - x.amin(1)) / levels, x.abs().amax(1) / 2**14)
    assert ((wide - x).abs().amax(1)[large] <= (0.5 + 2**-8) * scale[large]).all()
    assert (scale[large] <= wanted[large] * (1 + 2**-7) * (1 + 1e-6)).all()
    assert (wide[~large] == 0).all()
    assert (wide[x == 0] == 0).all(), "zero is exact"


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_is_not_hidden(name):
    x = torch.ones(3, 32)
    x[0, 31], x[2, 4] = float("nan"), float("-inf")
    wide = reference_decode(*encoded(x, name))
    assert wide[0].isnan().all() and wide[2].isnan().all() and (wide[1] == 1).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=32, max_size=32), st.sampled_from(sorted(CODECS)))
def test_any_numbers(numbers, name):
    x = torch.tensor([numbers], dtype=torch.float32)
    codes, parameters = encoded(x, name)
    assert torch.equal(codes, reference_encode(x, name)[0])
    error = (reference_decode(codes, parameters).double() - x.double()).abs().max()
    span = max(float(x.double().max() - x.double().min()) / CODECS[name].levels, float(x.abs().max()) / 2**14)
    assert error <= max(0.51 * span, 2.0**-100)
