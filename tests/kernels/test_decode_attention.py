"""Decode attention over every format of keys and values: the reference in double precision over the same stored bytes, values by hand,
extremes, and bits that depend neither on company nor on how the tokens came."""

import math
from dataclasses import replace
from functools import cache as cache_of
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from lmoffload.kernels import decode_attention as module
from lmoffload.kernels.code import host_machine
from lmoffload.kernels.codec import CODECS
from lmoffload.kernels.decode_attention import Newest, decode_attention, reference_decode_attention, share_pairs
from lmoffload.kernels.kv_rows import Memo, keys_of, values_of
from lmoffload.kernels.pool import Pool
from lmoffload_solver import counting
from lmoffload_solver.formats import KV_FORMATS
from lmoffload_solver.model import LayerShape

SHAPES = [(8, 2, 64, 64), (9, 3, 64, 64), (7, 1, 80, 80), (4, 4, 5, 5), (12, 2, 192, 128), (6, 2, 33, 17), (16, 2, 256, 256)]
LENGTHS = [1, 17, 31, 32, 63, 128, 129, 300]
TOLERANCE = 5e-5
"""Of results of unit size with logits up to about 30; 2e-5 in fp32."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Cache:
    """Rows of random tokens, of different length and room, laid out with gaps of 255s, which are NaN wherever they are read as numbers."""

    def __init__(
        self, lengths, heads, kv_heads, dim, value_dim, formats=("fp32", "fp32"), window=None, seeds=None, gap=2, known=2 / 3, change=None
    ):
        layer = LayerShape(num_heads=heads, num_kv_heads=kv_heads, key_dim=dim, value_dim=value_dim, window=window)
        self.lengths, self.rows = np.array(lengths), np.arange(len(lengths))
        tokens = [length + i % 4 for i, length in enumerate(lengths)]
        key_rooms = [counting.key_room(layer, most, formats[0]) for most in tokens]
        value_rooms = [counting.kv_tokens(layer, most) for most in tokens]
        key_sizes = [kv_heads * counting.key_head_bytes(dim, room, formats[0]) for room in key_rooms]
        value_sizes = [kv_heads * room * counting.value_token_bytes(value_dim, formats[1]) for room in value_rooms]
        self.keys = keys_of(formats[0], kv_heads, dim, *self._memory(key_sizes, 4 * gap * dim), np.array(key_rooms))
        self.values = values_of(formats[1], kv_heads, value_dim, *self._memory(value_sizes, 4 * gap * value_dim), np.array(value_rooms))
        for row, length in enumerate(lengths):
            seed = 10 * (row if seeds is None else seeds[row])
            new = random(length, kv_heads, dim, seed=seed), random(length, kv_heads, value_dim, seed=seed + 1)
            if change is not None:
                change(row, *new)
            for rows, tokens_of in zip((self.keys, self.values), new, strict=True):
                prompt = int(known * length)
                rows.store_run(row, 0, tokens_of[:prompt])
                for place in range(prompt, length):
                    rows.store_tokens(np.array([row]), np.array([place]), tokens_of[place : place + 1])

    @staticmethod
    def _memory(sizes, gap):
        starts = np.concatenate(([0], np.cumsum(np.array(sizes) + gap)))
        return torch.full((int(starts[-1]) + gap,), 255, dtype=torch.uint8), starts[:-1] + gap

    def attend(self, q, pool, **options):
        options = {"scaling": 1.0} | options
        return decode_attention(q, self.keys, self.values, self.rows, self.lengths, pool=pool, **options)

    def exact(self, q, **options):
        sinks = options.pop("sinks", None)
        options |= {"sinks": None if sinks is None else sinks.double()}
        return reference_decode_attention(q.double(), self.keys, self.values, self.rows, self.lengths, **options)


def check(cache, q, pool, tolerance=TOLERANCE, **options):
    error = (cache.attend(q, pool, **options) - cache.exact(q, **options)).abs().max()
    assert error < tolerance, (error, options)


@pytest.mark.parametrize("formats", [(kind, kind) for kind in KV_FORMATS])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SHAPES)
def test_against_the_reference(heads, kv_heads, dim, value_dim, formats, pool):
    q = 3 * random(len(LENGTHS), heads, dim, seed=5)
    for ring in (None, 40, 64):
        cache = Cache(LENGTHS, heads, kv_heads, dim, value_dim, formats, ring)
        for window, softcap, sink in product((None, 33), (None, 30.0), (False, True)):
            options = {"scaling": 2 * dim**-0.5, "window": window, "softcap": softcap, "sinks": 4 * random(heads) if sink else None}
            check(cache, q, pool, 2e-5 if formats[0] == "fp32" else TOLERANCE, **options)


@pytest.mark.parametrize("formats", [("fp32", "int8"), ("bf16", "int4-g32"), ("int8", "fp32"), ("int4-g32", "bf16"), ("int8", "int4-g32")])
def test_keys_and_values_in_different_formats(formats, pool):
    cache = Cache(LENGTHS, 6, 2, 40, 72, formats, 40)
    check(cache, random(len(LENGTHS), 6, 40), pool, scaling=0.3)


@pytest.mark.parametrize("formats", [(kind, kind) for kind in KV_FORMATS])
def test_vectors_of_the_other_width(formats, pool, monkeypatch):
    """LLVM makes what the machine lacks of what it has."""
    other = replace(host_machine(), width=24 - host_machine().width, halves=False)
    monkeypatch.setattr(module, "host_machine", lambda: other)
    monkeypatch.setattr(module, "decode_kernel", cache_of(module.decode_kernel.__wrapped__))
    for heads in (1, 3, 14):
        cache = Cache(LENGTHS, heads, 1, 80, 48, formats)
        check(cache, random(len(LENGTHS), heads, 80), pool, scaling=0.2)


@pytest.mark.parametrize("formats", [(kind, kind) for kind in KV_FORMATS])
def test_how_near_the_stored_tokens_are(formats):
    """fp32 is exact; bf16 within 2^-8; a quantized number within half a step of its line (keys are rounded to bf16 before)."""
    stored = {}
    cache = Cache([7, 100], 2, 2, 40, 24, formats, change=lambda row, k, v: stored.update({row: (k, v)}))
    steps = {"int8": 255, "int4-g32": 15}
    for row, (key, value) in stored.items():
        end = key.shape[0]
        for rows, exact in ((cache.keys, key), (cache.values, value)):
            error = (rows.widened(row, 0, end) - exact.transpose(0, 1)).abs().max()
            spread = float(exact.max() - exact.min())
            least, most = {"fp32": (0, 0), "bf16": (1e-4, 2**-9 * spread)}.get(rows.format, (0, 0))
            if rows.format in steps:
                least, most = 1e-3, 0.51 * spread / steps[rows.format] + 2**-8 * spread
            assert least <= error <= most, (rows.format, error, most)


def softmax(logits):
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("kind", KV_FORMATS)
def test_by_hand(kind, pool):
    """Two tokens whose keys are 0 and 3, values 0 and 1: numbers that every format holds."""

    def change(row, key, value):
        key[:, 0, 0], value[:, 0, 0] = torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1.0])

    cache, q = Cache([2], 1, 1, 1, 1, (kind, kind), change=change), torch.tensor([[[2.0]]])

    def attend(**options):
        return cache.attend(q, pool, scaling=0.5, **options).item()

    assert attend() == pytest.approx(softmax([0, 3])[1], rel=4e-3)
    assert attend(sinks=torch.tensor([2.0])) == pytest.approx(softmax([0, 3, 2])[1], rel=4e-3)
    assert attend(softcap=1.5) == pytest.approx(softmax([0, 1.5 * math.tanh(2)])[1], rel=4e-3)
    assert attend(window=1) == pytest.approx(1, rel=4e-3)


@pytest.mark.parametrize("kind", KV_FORMATS)
@pytest.mark.parametrize("case", ["saturation", "zeros", "huge channel", "equal", "offset"])
def test_adversarial(kind, case, pool):
    """The kernel is as near to the stored numbers; what the format loses is `test_how_near_the_stored_tokens_are`'s."""

    def change(row, key, value):
        for new in (key, value):
            if case == "zeros":
                new.zero_()
            elif case == "equal":
                new.fill_(0.7)
            elif case == "huge channel":
                new[..., 3].mul_(1e4)
            elif case == "offset":
                new.add_(100)
            else:
                new.copy_(new.sign())

    cache = Cache([70, 33], 4, 2, 64, 64, (kind, kind), change=change)
    q = random(2, 4, 64)
    q[..., 3] *= 1e-4 if case == "huge channel" else 1
    largest = float(cache.values.widened(0, 0, 70).abs().max())
    check(cache, q, pool, 1e-4 * max(1.0, largest), scaling=0.125)


@pytest.mark.parametrize("kind", KV_FORMATS)
def test_extreme_logits(kind, pool):
    """Very large, very small and equal logits: no overflow, no 0 / 0, weights that sum to one."""
    cache = Cache([70], 2, 1, 4, 1, (kind, kind), change=lambda row, key, value: value.fill_(1.0))
    for factor in (0.0, 1e4, -1e4, 1e18):
        assert cache.attend(factor * torch.ones(1, 2, 4), pool).flatten().tolist() == pytest.approx([1.0, 1.0], rel=4e-3)
    sunk = cache.attend(torch.zeros(1, 2, 4), pool, sinks=torch.tensor([200.0, -200.0]))
    assert sunk.flatten().tolist() == pytest.approx([0.0, 1.0], rel=4e-3)


@pytest.mark.parametrize("kind", KV_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(kind, bad, pool):
    def change(row, key, value):
        if row == 1:
            (key if math.isnan(bad) else value)[5] = bad

    out = Cache([40, 40], 2, 1, 8, 8, (kind, kind), change=change).attend(random(2, 2, 8), pool)
    assert out[0].isfinite().all() and not out[1].isfinite().any()


@pytest.mark.parametrize("formats", [(kind, kind) for kind in KV_FORMATS])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), SHAPES)
def test_bits_depend_neither_on_company_nor_on_how_tokens_came(heads, kv_heads, dim, value_dim, formats, pool):
    lengths, ring = [1, 700, 33, 128, 5, 257], 150
    many, q = Cache(lengths, heads, kv_heads, dim, value_dim, formats, ring), random(len(lengths), heads, dim)
    options = {"scaling": 0.3, "window": 50, "softcap": 20.0, "sinks": random(heads)}
    together = many.attend(q, pool, **options)
    for i, length in enumerate(lengths):
        alone = Cache([length], heads, kv_heads, dim, value_dim, formats, ring, seeds=[i], gap=i, known=(i % 3) / 2)
        with Pool(1) as one:
            assert torch.equal(alone.attend(q[i : i + 1], one, **options)[0], together[i]), length


@pytest.mark.parametrize("kind", CODECS)
def test_a_run_may_come_in_pieces(kind):
    """What is stored does not depend on where a prompt was cut, nor do tokens that have left the ring matter."""
    for window in (None, 50):
        whole, cut = (Cache([100], 2, 2, 20, 44, (kind, kind), window) for _ in range(2))
        new = random(100, 2, 20), random(100, 2, 44)
        for cache, edges in ((whole, (0, 100)), (cut, (0, 7, 40, 41, 96, 100))):
            for first, end in pairwise(edges):
                cache.keys.store_run(0, first, new[0][first:end])
                cache.values.store_run(0, first, new[1][first:end])
        for one, other in ((whole.keys, cut.keys), (whole.values, cut.values)):
            assert torch.equal(one.widened(0, 50, 100), other.widened(0, 50, 100))


def test_nothing_to_attend_to(pool):
    cache = Cache([], 2, 1, 8, 8)
    assert cache.attend(torch.empty(0, 2, 8), pool).shape == (0, 2, 8)


def test_jobs_cover_all_work_once():
    for spans, kv_heads, floats, threads in (
        ([1000] * 16, 4, 128, 2),
        ([5, 50000, 7, 900], 3, 128, 5),
        ([3], 1, 4, 2),
        ([1, 10**6], 1, 128, 3),
    ):
        ranges = share_pairs(spans, kv_heads, floats, threads)
        assert [first for first, _ in ranges] == [0, *[end for _, end in ranges[:-1]]] and ranges[-1][1] == len(spans) * kv_heads


@pytest.mark.parametrize("formats", [(kind, kind) for kind in KV_FORMATS] + [("fp32", "int8"), ("int4-g32", "bf16")])
@pytest.mark.parametrize(("kv_heads", "dim", "value_dim"), [(2, 64, 64), (3, 80, 80), (1, 5, 17), (2, 33, 128)])
def test_new_tokens_are_stored_as_tokens_are(kv_heads, dim, value_dim, formats):
    """The kernel stores the bytes that `store_tokens` does, at the end of a group and of a ring too, and attends to them."""
    lengths = np.array([1, 31, 32, 33, 63, 64, 100, 41])
    for ring in (None, 40):
        one, two = (Cache(lengths.tolist(), kv_heads, kv_heads, dim, value_dim, formats, ring) for _ in range(2))
        new = random(len(lengths), kv_heads, dim, seed=1), random(len(lengths), kv_heads, value_dim, seed=2)
        for kept, given in zip((one.keys, one.values), new, strict=True):
            kept.store_tokens(one.rows, lengths - 1, given)
        q = random(len(lengths), kv_heads, dim)
        with Pool(2) as pool:
            expected, found = one.attend(q, pool), two.attend(q, pool, newest=Newest(*new, lengths, Memo()))
        assert torch.equal(one.keys.data, two.keys.data) and torch.equal(one.values.data, two.values.data)
        assert torch.equal(expected, found)


def test_lengths_may_grow_where_a_memo_is_kept(pool):
    """The same array, counted on; work is shared out for what it may grow to."""
    lengths, memo = np.array([40, 7]), Memo()
    cache = Cache([200, 130], 4, 2, 64, 64)
    q = random(2, 4, 64)
    for _ in range(5):
        options = {"scaling": 0.1, "pool": pool}
        newest = Newest(random(2, 2, 64), random(2, 2, 64), np.array([200, 130]), memo)
        found = decode_attention(q, cache.keys, cache.values, cache.rows, lengths, newest=newest, **options)
        assert torch.equal(found, decode_attention(q, cache.keys, cache.values, cache.rows, lengths.copy(), **options))
        lengths += 20
