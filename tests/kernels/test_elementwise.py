"""Norms and gates against their definitions in double precision, at any size, place and number of threads."""

import pytest
import torch

from lmoffload.kernels.elementwise import add, rms_norm, rotate, silu_gate
from lmoffload.kernels.pool import Pool

UNIT = 2.0**-24


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(size[-1]))


@pytest.mark.parametrize("k", [1, 7, 16, 33, 64, 2048, 5000])
def test_norm(pool, k):
    x, weight = random(9, k) * torch.logspace(-3, 4, 9)[:, None], random(k)
    for eps in (1e-5, 1e-6):
        exact = weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
        assert ((rms_norm(x, weight, eps, pool) - exact).abs() <= (k / 16 + 16) * UNIT * exact.abs()).all()


def test_norm_of_heads_and_of_rows_apart(pool):
    x, weight = random(1, 6, 5, 128), random(128)
    assert torch.equal(rms_norm(x.transpose(1, 2), weight, 1e-6, pool), rms_norm(x, weight, 1e-6, pool).transpose(1, 2))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 300_001])
def test_gate(pool, count):
    gate, up = random(count) * 20, random(count + 1)[1:]
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    out = silu_gate(gate, up, pool)
    assert out is gate
    assert ((out - exact).abs() <= 8 * UNIT * exact.abs() + 1e-35).all()


def test_gate_at_the_ends(pool):
    gate = torch.tensor([0.0, -0.0, 100.0, -100.0, 3e38, -3e38, float("inf"), float("nan")])
    out = silu_gate(gate.clone(), torch.ones(8), pool)
    assert out[:3].tolist() == [0.0, 0.0, 100.0] and out[3].abs() < 1e-35 and out[4] == gate[4] and out[5] == 0
    assert out[6] == float("inf") and out[7].isnan()


def test_sum(pool):
    into, other = random(300_001), random(300_002)[1:]
    exact = into + other
    assert torch.equal(add(into, other, pool), exact)


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80, 128])
def test_rotation_by_halves(pool, dim):
    angles = random(37, dim) * 9
    q, k = random(37, 5, dim), random(37, 2, dim + 1)[..., 1:].contiguous()
    cos, sin = angles.cos(), angles.sin()
    for x in (q.clone(), k.clone()):
        turned = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1).double()
        parts = x.double() * cos[:, None], turned * sin[:, None]
        other = x.clone()
        rotate((x, other), cos, sin, pool)
        assert torch.equal(x, other)
        assert ((x - sum(parts)).abs() <= 3 * UNIT * sum(part.abs() for part in parts)).all()


def test_bits_do_not_depend_on_company_or_threads():
    x, up, weight = random(300, 1001), random(300, 1001), random(1001)
    with Pool(1) as one, Pool(3) as three:
        normed, gated = rms_norm(x, weight, 1e-5, one), silu_gate(x.clone(), up, one)
        assert torch.equal(rms_norm(x, weight, 1e-5, three), normed)
        assert torch.equal(silu_gate(x.clone(), up, three), gated)
        for row in (0, 17, 299):
            assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5, three), normed[row : row + 1])
            assert torch.equal(silu_gate(x[row : row + 1].clone(), up[row : row + 1], three), gated[row : row + 1])
