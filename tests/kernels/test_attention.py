"""Attention: values by hand, torch's own attention, the references in double precision, and bits that do not depend on company."""

import math
from itertools import product

import pytest
import torch
from torch.nn import functional

from lmoffload.kernels.attention import (
    decode_attention,
    prefill_attention,
    reference_decode_attention,
    reference_prefill_attention,
    share_pairs,
    share_segments,
)
from lmoffload.kernels.pool import Pool

SHAPES = [(8, 2, 64, 64), (9, 3, 64, 64), (7, 1, 80, 80), (4, 4, 5, 5), (12, 2, 192, 128), (6, 2, 33, 17), (16, 2, 256, 256)]
FEATURES = list(product((None, 1, 3, 100), (None, 30.0), (False, True)))
TOLERANCE = 2e-5
"""Of results of unit size with logits up to about 30."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Cache:
    """Rows of different length and capacity, laid out with gaps."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, value_dim: int, seed: int = 0, gap: int = 3) -> None:
        self.lengths = torch.tensor(lengths)
        self.capacities = self.lengths + torch.tensor([i % 4 for i in range(len(lengths))])
        self.kv_heads, self.dim, self.value_dim = kv_heads, dim, value_dim
        self.keys, self.key_starts = self._rows(dim, seed, gap)
        self.values, self.value_starts = self._rows(value_dim, seed + 1, gap)

    def _rows(self, dim: int, seed: int, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
        pieces, starts, place = [], [], 0
        for i, capacity in enumerate(self.capacities.tolist()):
            starts.append(place + gap)
            piece = torch.full((gap + self.kv_heads * capacity * dim,), float("nan"))  # what is not valid must not be read
            length = int(self.lengths[i])
            piece[gap:].view(self.kv_heads, capacity, dim)[:, :length] = random(self.kv_heads, length, dim, seed=seed + 10 * i)
            pieces.append(piece)
            place += len(piece)
        return torch.cat(pieces), torch.tensor(starts)

    def attend(self, q: torch.Tensor, pool: Pool | None = None, **options) -> torch.Tensor:
        options |= {"num_kv_heads": self.kv_heads, "value_dim": self.value_dim}
        places = self.key_starts, self.value_starts, self.capacities, self.lengths
        if pool is None:
            sinks = options.pop("sinks")
            return reference_decode_attention(
                q.double(), self.keys.double(), self.values.double(), *places, sinks=None if sinks is None else sinks.double(), **options
            )
        return decode_attention(q, self.keys, self.values, *places, pool=pool, **options)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SHAPES)
def test_decode_against_the_reference(heads, kv_heads, dim, value_dim, pool):
    cache = Cache([1, 17, 128, 129, 300], kv_heads, dim, value_dim)
    q = 3 * random(5, heads, dim, seed=5)
    for window, softcap, sink in FEATURES:
        options = {"scaling": 2 * dim**-0.5, "window": window, "softcap": softcap, "sinks": 4 * random(heads) if sink else None}
        error = (cache.attend(q, pool, **options) - cache.attend(q, **options)).abs().max()
        assert error < TOLERANCE, (window, softcap, sink)


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


def test_references_against_torch():
    q, k, v = random(40, 6, 16), random(40, 2, 16), random(40, 2, 16)
    mask = torch.ones(40, 40, dtype=torch.bool).tril() & ~torch.ones(40, 40, dtype=torch.bool).tril(-7)
    heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
    eager = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True, scale=0.3)[0].transpose(0, 1)
    assert torch.allclose(reference_prefill_attention(q, k, v, [(0, 40)], scaling=0.3, window=7), eager, atol=1e-6)
    starts, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([40])
    keys, values = (t.transpose(0, 1).flatten() for t in (k, v))
    last = reference_decode_attention(q[39:], keys, values, starts, starts, lengths, lengths, num_kv_heads=2, scaling=0.3, window=7)
    assert torch.allclose(last[0], eager[39], atol=1e-6)


def test_window_by_hand(pool):
    """With equal logits a query's result is the mean of the values it sees: with a window of 3, its own token and the two before."""
    q, k = torch.zeros(6, 1, 4), random(6, 1, 4)
    v = torch.arange(6.0).view(6, 1, 1)
    means = [0, 0.5, 1, 2, 3, 4]
    assert prefill_attention(q, k, v, [(0, 6)], scaling=1.0, window=3, pool=pool).flatten().tolist() == pytest.approx(means)
    start, length = torch.tensor([0]), torch.tensor([6])
    last = decode_attention(
        q[:1], k.flatten(), v.flatten(), start, start, length, length, num_kv_heads=1, value_dim=1, scaling=1.0, window=3, pool=pool
    )
    assert last.item() == pytest.approx(4)


def test_sink_and_softcap_by_hand(pool):
    q = torch.tensor([[[2.0]]])
    keys, values = torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1.0])
    start, length = torch.tensor([0]), torch.tensor([2])

    def attend(**options) -> float:
        places = start, start, length, length
        return decode_attention(q, keys, values, *places, num_kv_heads=1, scaling=0.5, pool=pool, **options).item()

    logit = 3.0
    assert attend() == pytest.approx(math.exp(logit) / (1 + math.exp(logit)))
    assert attend(sinks=torch.tensor([2.0])) == pytest.approx(math.exp(logit) / (1 + math.exp(logit) + math.exp(2)))
    capped = 1.5 * math.tanh(logit / 1.5)
    assert attend(softcap=1.5) == pytest.approx(math.exp(capped) / (1 + math.exp(capped)))


def test_extreme_logits(pool):
    """Very large, very small and equal logits: no overflow, no 0 / 0, weights that sum to one."""
    cache = Cache([70], 1, 4, 1)
    cache.values.fill_(1.0)
    for factor in (0.0, 1e4, -1e4, 1e18):
        out = cache.attend(factor * torch.ones(1, 2, 4), pool, scaling=1.0, window=None, softcap=None, sinks=None)
        assert out.flatten().tolist() == pytest.approx([1.0, 1.0])
    sunk = cache.attend(torch.zeros(1, 2, 4), pool, scaling=1.0, window=None, softcap=None, sinks=torch.tensor([200.0, -200.0]))
    assert sunk.flatten().tolist() == pytest.approx([0.0, 1.0])


def test_a_nan_is_not_hidden(pool):
    cache = Cache([20, 20], 1, 8, 8)
    cache.keys[int(cache.key_starts[1]) + 5] = float("nan")
    out = cache.attend(random(2, 2, 8), pool, scaling=1.0, window=None, softcap=None, sinks=None)
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize(("window", "softcap", "sink"), [(None, None, False), (50, 20.0, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SHAPES)
def test_bits_of_a_decode_row_do_not_depend_on_its_company(heads, kv_heads, dim, value_dim, window, softcap, sink, pool):
    lengths = [1, 700, 33, 128, 5, 257]
    many, q = Cache(lengths, kv_heads, dim, value_dim), random(len(lengths), heads, dim)
    options = {"scaling": 0.3, "window": window, "softcap": softcap, "sinks": random(heads) if sink else None}
    together = many.attend(q, pool, **options)
    for i, length in enumerate(lengths):
        alone = Cache([length], kv_heads, dim, value_dim, seed=10 * i, gap=i)
        with Pool(1) as one:
            assert torch.equal(alone.attend(q[i : i + 1], one, **options)[0], together[i]), length


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
    none = torch.zeros(0, dtype=torch.int64)
    out = decode_attention(torch.empty(0, 2, 8), random(8), random(8), none, none, none, none, num_kv_heads=1, scaling=1.0, pool=pool)
    assert out.shape == (0, 2, 8)


def test_jobs_cover_all_work_once():
    for spans, kv_heads, floats, threads in (
        ([1000] * 16, 4, 128, 2),
        ([5, 50000, 7, 900], 3, 128, 5),
        ([3], 1, 4, 2),
        ([1, 10**6], 1, 128, 3),
    ):
        ranges = share_pairs(spans, kv_heads, floats, threads)
        assert [first for first, _ in ranges] == [0, *[end for _, end in ranges[:-1]]] and ranges[-1][1] == len(spans) * kv_heads
    for sizes, heads, threads in (([2000], 3, 2), ([64] * 16, 32, 2), ([1, 5000, 7], 1, 4), ([24], 2, 2), ([10**5], 40, 16)):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        segments = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        jobs = share_segments(segments, heads, 128, None, threads)
        for (token, _), size in zip(segments, sizes, strict=True):
            mine = [job for job in jobs if job.token == token]
            assert sum((j.end_query - j.first_query) * (j.end_head - j.first_head) for j in mine) == size * heads
            assert all(j.first_query % 24 == 0 and j.end_query > j.first_query for j in mine)
