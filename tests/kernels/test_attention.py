"""Prefill attention: values by hand, torch's own attention, the references in double precision, and bits that do not depend on company."""

from itertools import product

import pytest
import torch
from torch.nn import functional

from lmoffload.kernels.attention import prefill_attention, reference_prefill_attention, share_segments
from lmoffload.kernels.pool import Pool

SHAPES = [(8, 2, 64, 64), (9, 3, 64, 64), (7, 1, 80, 80), (4, 4, 5, 5), (12, 2, 192, 128), (6, 2, 33, 17), (16, 2, 256, 256)]
FEATURES = list(product((None, 1, 3, 100), (None, 30.0), (False, True)))
TOLERANCE = 2e-5
"""Of results of unit size with logits up to about 30."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SHAPES)
def test_prefill_against_the_reference(heads, kv_heads, dim, value_dim, pool):
    q, k, v = 3 * random(330, heads, dim), random(330, kv_heads, dim), random(330, kv_heads, value_dim)
    segments = [(0, 1), (1, 30), (35, 330)]
    for window, softcap, sink in FEATURES:
        options = {"scaling": 2 * dim**-0.5, "window": window, "softcap": softcap, "sinks": 4 * random(heads) if sink else None}
        out = prefill_attention(q, k, v, segments, pool=pool, **options)
        options["sinks"] = None if options["sinks"] is None else options["sinks"].double()
        exact = reference_prefill_attention(q.double(), k.double(), v.double(), segments, **options)
        assert (out - exact).abs().max() < TOLERANCE, (window, softcap, sink)
        assert (out[30:35] == 0).all()


def test_reference_against_torch():
    q, k, v = random(40, 6, 16), random(40, 2, 16), random(40, 2, 16)
    mask = torch.ones(40, 40, dtype=torch.bool).tril() & ~torch.ones(40, 40, dtype=torch.bool).tril(-7)
    heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
    eager = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True, scale=0.3)[0].transpose(0, 1)
    assert torch.allclose(reference_prefill_attention(q, k, v, [(0, 40)], scaling=0.3, window=7), eager, atol=1e-6)


def test_window_by_hand(pool):
    """With equal logits a query's result is the mean of the values it sees: with a window of 3, its own token and the two before."""
    q, k = torch.zeros(6, 1, 4), random(6, 1, 4)
    v = torch.arange(6.0).view(6, 1, 1)
    means = [0, 0.5, 1, 2, 3, 4]
    assert prefill_attention(q, k, v, [(0, 6)], scaling=1.0, window=3, pool=pool).flatten().tolist() == pytest.approx(means)


@pytest.mark.parametrize(("window", "softcap", "sink"), [(None, None, False), (50, 20.0, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SHAPES)
def test_bits_of_a_segment_do_not_depend_on_its_company(heads, kv_heads, dim, value_dim, window, softcap, sink, pool):
    sizes = [1, 200, 23, 24, 25, 77]
    parts = [(random(s, heads, dim, seed=s), random(s, kv_heads, dim, seed=s), random(s, kv_heads, value_dim, seed=s)) for s in sizes]
    packed = [torch.cat([part[i] for part in parts]) for i in range(3)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    segments = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    options = {"scaling": 0.3, "window": window, "softcap": softcap, "sinks": random(heads) if sink else None}
    together = prefill_attention(*packed, segments, pool=pool, **options)
    for (first, end), part in zip(segments, parts, strict=True):
        with Pool(1) as one:
            assert torch.equal(prefill_attention(*part, [(0, end - first)], pool=one, **options), together[first:end])


def test_prefill_takes_views_of_a_joint_projection(pool):
    joint = random(50, 4 + 2 + 2, 16)
    q, k, v = joint.split((4, 2, 2), dim=1)
    expected = prefill_attention(q.contiguous(), k.contiguous(), v.contiguous(), [(0, 50)], scaling=0.25, pool=pool)
    assert torch.equal(prefill_attention(q, k, v, [(0, 50)], scaling=0.25, pool=pool), expected)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    assert torch.equal(prefill_attention(*turned, [(0, 50)], scaling=0.25, pool=pool), expected)


def test_nothing_to_attend_to(pool):
    assert (prefill_attention(random(4, 2, 8), random(4, 1, 8), random(4, 1, 8), [], scaling=1.0, pool=pool) == 0).all()


def test_jobs_cover_all_work_once():
    for sizes, heads, threads in (([2000], 3, 2), ([64] * 16, 32, 2), ([1, 5000, 7], 1, 4), ([24], 2, 2), ([10**5], 40, 16)):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        segments = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        jobs = share_segments(segments, heads, 128, None, threads)
        for (token, _), size in zip(segments, sizes, strict=True):
            mine = [job for job in jobs if job.token == token]
            assert sum((j.end_query - j.first_query) * (j.end_head - j.first_head) for j in mine) == size * heads
            assert all(j.first_query % 24 == 0 and j.end_query > j.first_query for j in mine)
