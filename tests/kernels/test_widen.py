"""Widening: the reference against values worked out by hand, the compiled functions against the reference, bit for bit."""

import pytest
import torch
from llvmlite import ir

from lmoffload.kernels.code import Compiled, Machine, host_machine
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.product import emit_widen, format_kernels
from lmoffload.kernels.tile_floats import emit_tile_widen
from lmoffload.profiler.weights import SCALE_PLACES
from lmoffload_solver.formats import FORMATS, QUANTIZED
from tests.kernels.weights import random_matrix


def half(value: float) -> list[int]:
    return torch.tensor([value], dtype=torch.float16).view(torch.uint8).tolist()


def widened(matrix: Matrix, widen) -> torch.Tensor:
    out = torch.full((matrix.n, matrix.k + 3), 7.0)
    widen(matrix.data.data_ptr(), matrix.row_bytes, matrix.n, out.data_ptr(), out.stride(0) * 4, matrix.k)
    assert (out[:, matrix.k :] == 7).all()
    return out[:, : matrix.k].contiguous()


def test_reference_by_hand():
    q8 = torch.tensor([*half(0.5), *range(16), *[(256 - i) % 256 for i in range(16)]], dtype=torch.uint8)
    assert reference_widen(Matrix(q8, "q8_0", 1, 32)).tolist() == [[0.5 * i for i in range(16)] + [-0.5 * i for i in range(16)]]
    nibbles = [(15 - i) << 4 | i for i in range(16)]
    q4 = torch.tensor([*half(2.0), *nibbles], dtype=torch.uint8)
    assert reference_widen(Matrix(q4, "q4_0", 1, 32)).tolist() == [[2.0 * (i - 8) for i in range(16)] + [2.0 * (7 - i) for i in range(16)]]
    q41 = torch.tensor([*half(2.0), *half(-1.0), *nibbles], dtype=torch.uint8)
    assert reference_widen(Matrix(q41, "q4_1", 1, 32)).tolist() == [
        [2.0 * i - 1 for i in range(16)] + [2.0 * (15 - i) - 1 for i in range(16)]
    ]


def test_a_k_quant_by_hand():
    """q4_k: scales 1..4 whole, 5..8 in parts (5 = 1 + 4 · 1 ...); all minima 1; codes 3 in the low and 12 in the high halves."""
    scales = [1, 2, 3, 4, 1, 1, 1, 1, *[1 << 4 | low for low in (5, 6, 7, 8)]]
    block = torch.tensor([*half(2.0), *half(0.5), *scales, *[12 << 4 | 3] * 128], dtype=torch.uint8)
    wanted = [2.0 * scale * code - 0.5 for scale, code in zip(range(1, 9), (3, 12) * 4, strict=True) for _ in range(32)]
    assert reference_widen(Matrix(block, "q4_k", 1, 256)).tolist() == [wanted]
    assert widened(Matrix(block, "q4_k", 1, 256), format_kernels("q4_k").widen).tolist() == [wanted]


def test_reference_applies_the_row_order():
    data = torch.arange(3, dtype=torch.float32).view(torch.uint8)
    assert reference_widen(Matrix(data, "fp32", 3, 1, torch.tensor([2, 0, 1]))).tolist() == [[2.0], [0.0], [1.0]]


@pytest.mark.parametrize("offset", [0, 2, 6, 1])
@pytest.mark.parametrize("format_name", FORMATS)
def test_compiled_equals_reference(format_name, offset):
    block = FORMATS[format_name].block_elements
    for n, k in ((1, 32), (5, 96), (3, 2048 + 32)):
        matrix = random_matrix(format_name, n, -(-k // block) * block, seed=k, offset=offset)
        assert torch.equal(widened(matrix, format_kernels(format_name).widen), reference_widen(matrix))


@pytest.mark.parametrize("format_name", ["fp32", "bf16", "fp16"])
def test_columns_that_fill_no_vector(format_name):
    for k in (1, 7, 31, 33, 50, 100):
        matrix = random_matrix(format_name, 3, k, seed=k)
        assert torch.equal(widened(matrix, format_kernels(format_name).widen), reference_widen(matrix))


@pytest.mark.parametrize("machine", [host_machine(), Machine(8, False), Machine(16, False)], ids=str)
@pytest.mark.parametrize("format_name", QUANTIZED)
def test_tiles(format_name, machine):
    module = ir.Module()
    code = emit_tile_widen(module, machine, format_name)
    widen = Compiled(module).function(code)
    for n, k in ((16, 128), (48, 384)):
        matrix = random_matrix(format_name, n, k, seed=k, offset=3)
        assert torch.equal(widened(matrix, widen), reference_widen(matrix))


@pytest.mark.parametrize("machine", [host_machine(), Machine(8, False), Machine(16, False)], ids=str)
@pytest.mark.parametrize("format_name", ["bf16", "fp16"])
def test_every_16_bit_pattern(format_name, machine):
    """Zeros, subnormal numbers, infinities and NaN among them; also as on machines without an instruction for fp16."""
    module = ir.Module()
    code = emit_widen(module, machine, format_name)
    matrix = Matrix(torch.arange(-32768, 32768, dtype=torch.int16).view(torch.uint8), format_name, 16, 4096)
    wide, reference = widened(matrix, Compiled(module).function(code)), reference_widen(matrix)
    number = ~reference.isnan()
    assert torch.equal(wide.isnan(), ~number)
    assert torch.equal(wide[number].view(torch.int32), reference[number].view(torch.int32))


@pytest.mark.parametrize("machine", [Machine(8, True), Machine(8, False), Machine(16, False)], ids=str)
@pytest.mark.parametrize("format_name", SCALE_PLACES)
def test_extreme_blocks(format_name, machine):
    """Codes at both ends and at random, with scales that are zero, subnormal, largest and negative."""
    module = ir.Module()
    code = emit_widen(module, machine, format_name)
    fmt, (places, _) = FORMATS[format_name], SCALE_PLACES[format_name]
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for scale in (0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, 1.0, 1e-3):
        for fill in (0, 255, 128, 127, 15, 240, None):
            random = torch.randint(0, 256, (fmt.block_bytes,), dtype=torch.uint8, generator=generator)
            block = random if fill is None else torch.full_like(random, fill)
            for place in places:
                block[place : place + 2] = torch.tensor(half(scale), dtype=torch.uint8)
            blocks.append(block)
    matrix = Matrix(torch.cat(blocks), format_name, len(blocks), fmt.block_elements)
    wide, reference = widened(matrix, Compiled(module).function(code)), reference_widen(matrix)
    assert reference.isfinite().all() and torch.equal(wide, reference)
