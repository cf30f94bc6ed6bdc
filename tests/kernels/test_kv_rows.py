"""Keys and values of many rows stored in one go: the bytes that storing them token by token leaves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload.kernels.kv_rows import KVRows, Run, keys_of, row_bytes, values_of
from lmoffload.kernels.pool import Pool
from lmoffload_solver import counting
from lmoffload_solver.formats import KV_FORMATS
from lmoffload_solver.model import LayerShape

HEADS, DIM = 2, 24


def rows_of(kind: str, format_name: str, rooms: list[int]) -> KVRows:
    """Empty rows, laid out one behind the other."""
    make = keys_of if kind == "keys" else values_of
    numbers = np.array(rooms, dtype=np.int64)
    sizes = [row_bytes(make(format_name, HEADS, DIM, torch.empty(0), numbers, numbers), room) for room in rooms]
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    return make(format_name, HEADS, DIM, torch.zeros(int(starts[-1]), dtype=torch.uint8), starts[:-1], numbers)


@pytest.mark.parametrize("format_name", KV_FORMATS)
@pytest.mark.parametrize("kind", ["keys", "values"])
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 100),
    gap=st.integers(0, 3),
    cut=st.integers(0, 100),
    seed=st.integers(0, 99),
)
def test_runs_are_stored_as_their_tokens_are(kind, format_name, lengths, window, gap, cut, seed):
    layer = LayerShape(num_heads=HEADS, num_kv_heads=HEADS, key_dim=DIM, value_dim=DIM, window=window)
    room = (lambda n: counting.key_room(layer, n, format_name)) if kind == "keys" else (lambda n: counting.kv_tokens(layer, n))
    rooms = [room(length) for length in lengths]
    new = torch.randn(sum(lengths) + gap * len(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    begins = np.cumsum([gap, *(length + gap for length in lengths)])[:-1].tolist()
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    runs = [Run(row, 0, begins[row], begins[row] + lengths[row]) for row in order]
    whole, by_token, in_two = (rows_of(kind, format_name, rooms) for _ in range(3))
    with Pool(2) as pool:
        whole.store_runs(runs, new, pool)
    for run in runs:
        for place in range(run.end - run.begin):
            by_token.store_tokens(np.array([run.row]), np.array([place]), new[run.begin + place : run.begin + place + 1])
    in_two.store_runs([run._replace(end=min(run.end, run.begin + cut)) for run in runs], new)
    in_two.store_runs([Run(r.row, min(cut, r.end - r.begin), min(r.end, r.begin + cut), r.end) for r in runs], new)
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        expected = by_token.widened(row, first, length)
        assert torch.equal(whole.widened(row, first, length), expected)
        assert torch.equal(in_two.widened(row, first, length), expected)
