"""What computes on a device, on the CPU: torch's operators, and Triton's kernels in Triton's interpreter where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from lmoffload.kernels.attention import reference_prefill_attention
from lmoffload.kernels.codec import CODECS, encode_lines, store_encoded
from lmoffload.kernels.decode_attention import reference_decode_attention
from lmoffload.kernels.device_attention import device_decode_attention, device_prefill_attention
from lmoffload.kernels.device_linear import device_linear
from lmoffload.kernels.kv_rows import keys_of, row_bytes, values_of
from lmoffload.kernels.linear import reference_linear
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import LINE_ELEMENTS
from tests.kernels.weights import random_matrix


@pytest.mark.parametrize("format_name", ["fp32", "bf16", "fp16", "int8", "int4-g32", "int4-g64", "int4-g128"])
@pytest.mark.parametrize("n", [48, 37])
def test_products(format_name, n):
    order, x, bias = torch.randperm(n), torch.randn(5, 256), torch.randn(n)
    for offset, row_order in ((0, None), (6, None), (0, order)):
        matrix = random_matrix(format_name, n, 256, offset=offset, row_order=row_order)
        torch.testing.assert_close(device_linear(x, matrix, bias=bias), reference_linear(x, matrix, bias), rtol=1e-4, atol=1e-3)
    plain = random_matrix("bf16", n, 256)
    weight = plain.data.view(torch.bfloat16).view(n, 256)
    x, bias = x.bfloat16(), bias.bfloat16()
    assert torch.equal(device_linear(x, plain, bias=bias), torch.nn.functional.linear(x, weight, bias))


def test_a_format_that_no_device_takes():
    with pytest.raises(StatedError, match="q4_0"):
        device_linear(torch.randn(1, 256), random_matrix("q4_0", 16, 256))


SPECIAL = [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": torch.randn(6)}, {"window": 4, "softcap": 2.0, "sinks": torch.randn(6)}]


@pytest.mark.parametrize("special", SPECIAL)
def test_prefill(special):
    segments = [(0, 7), (7, 14), (14, 15), (15, 35)]
    q, k, v = torch.randn(38, 6, 16), torch.randn(38, 2, 16), torch.randn(38, 2, 24)
    expected = reference_prefill_attention(q, k, v, segments, scaling=0.3, **special)
    torch.testing.assert_close(device_prefill_attention(q, k, v, segments, scaling=0.3, **special), expected)
    known = device_prefill_attention(q[8:20], k[:20], v[:20], [(0, 20)], known=8, scaling=0.3, **special)
    whole = reference_prefill_attention(q[:20], k[:20], v[:20], [(0, 20)], scaling=0.3, **special)
    torch.testing.assert_close(known, whole[8:])


def stored(key_format, value_format, lengths, window=None, dim=16, value_dim=24, heads=2):
    """Keys and values of rows, in rooms for a few more tokens, or for the window."""
    spare = [length + 3 for length in lengths]
    value_rooms = np.array([room if window is None else min(room, window) for room in spare])
    key_rooms = value_rooms if key_format not in CODECS else np.array([
        room // LINE_ELEMENTS if window is None else min(room // LINE_ELEMENTS, -(-window // LINE_ELEMENTS)) for room in spare
    ])  # fmt: skip
    made = []
    for of, name, size, rooms in ((keys_of, key_format, dim, key_rooms), (values_of, value_format, value_dim, value_rooms)):
        empty = of(name, heads, size, torch.empty(0, dtype=torch.uint8), np.zeros(1, np.int64), rooms)
        sizes = [row_bytes(empty, int(room)) for room in rooms]
        starts = np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)
        rows = of(name, heads, size, torch.zeros(sum(sizes), dtype=torch.uint8), starts, rooms.astype(np.int64))
        for row, length in enumerate(lengths):
            rows.store_run(row, 0, torch.randn(length, heads, size))
        made.append(rows)
    return made


@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("bf16", "fp16"), ("int8", "int4-g32")])
@pytest.mark.parametrize("special", SPECIAL)
def test_decode(formats, special):
    for lengths in ([5, 41, 12], [33, 33, 33], [1, 2, 64]):
        window = special.get("window")
        keys, values = stored(*formats, lengths, window)
        for rows in (np.array([0, 1, 2]), np.array([2, 0])):
            q, ends = torch.randn(len(rows), 6, 16), np.array(lengths)[rows]
            expected = reference_decode_attention(q, keys, values, rows, ends, scaling=0.3, **special)
            torch.testing.assert_close(device_decode_attention(q, keys, values, rows, ends, scaling=0.3, **special), expected)


@pytest.mark.parametrize("name", CODECS)
def test_lines_are_encoded_in_torch_as_by_the_compiled_kernel(name):
    x = torch.randn(50, LINE_ELEMENTS) * torch.logspace(-8, 8, 50)[:, None]
    line = CODECS[name].line_bytes
    codes, parameters = torch.randperm(50) * line, 50 * line + torch.randperm(50) * 4
    one, two = (torch.zeros(50 * (line + 4), dtype=torch.uint8) for _ in range(2))
    encode_lines(x, name, one, codes, parameters)
    store_encoded(x, name, two, codes, parameters)
    assert torch.equal(one, two)


INTERPRETED = """
import numpy as np, torch
from lmoffload.kernels.decode_attention import reference_decode_attention
from lmoffload.kernels.linear import reference_linear
from lmoffload.kernels.matrix import reference_widen
from lmoffload.kernels.triton_decode import quantized_decode_attention
from lmoffload.kernels.triton_tiles import tile_product, widen_tiles
from tests.kernels.test_device_kernels import SPECIAL, stored
from tests.kernels.weights import random_matrix

for name in ("int8", "int4-g32", "int4-g64", "int4-g128"):
    for n, offset in ((48, 0), (37, 6), (5, 1)):
        matrix = random_matrix(name, n, 256, offset=offset)
        torch.testing.assert_close(widen_tiles(matrix, torch.float32), reference_widen(matrix), rtol=0, atol=1e-5)
        x = torch.randn(19, 256)
        torch.testing.assert_close(tile_product(x, matrix), reference_linear(x, matrix), rtol=1e-4, atol=1e-3)
for formats in (("int8", "int8"), ("int4-g32", "int4-g32"), ("int8", "int4-g32")):
    for special in SPECIAL:
        lengths = [5, 70, 32]
        keys, values = stored(*formats, lengths, special.get("window"))
        for rows in (np.array([0, 1, 2]), np.array([2, 0])):
            q, ends = torch.randn(len(rows), 6, 16), np.array(lengths)[rows]
            expected = reference_decode_attention(q, keys, values, rows, ends, scaling=0.3, **special)
            found = quantized_decode_attention(q, keys, values, rows, ends, scaling=0.3, **special)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_in_the_interpreter():
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
