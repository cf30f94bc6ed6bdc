"""Widening: the reference against values worked out by hand, the compiled functions against the reference, bit for bit."""

import pytest
import torch
from llvmlite import ir

from lmoffload.kernels.code import Compiled, Machine, host_machine
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.product import emit_widen, format_kernels
from lmoffload.kernels.tile_floats import emit_tile_widen
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


def test_reference_applies_the_row_order():
    data = torch.arange(3, dtype=torch.float32).view(torch.uint8)
    assert reference_widen(Matrix(data, "fp32", 3, 1, torch.tensor([2, 0, 1]))).tolist() == [[2.0], [0.0], [1.0]]


@pytest.mark.parametrize("offset", [0, 2, 6, 1])
@pytest.mark.parametrize("format_name", FORMATS)
def test_compiled_equals_reference(format_name, offset):
    for n, k in ((1, 32), (5, 96), (3, 2048 + 32)):
        matrix = random_matrix(format_name, n, k, seed=k, offset=offset)
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
@pytest.mark.parametrize("format_name", ["q8_0", "q4_0", "q4_1"])
def test_extreme_blocks(format_name, machine):
    """Codes at both ends with scales that are zero, subnormal, largest and negative."""
    module = ir.Module()
    code = emit_widen(module, machine, format_name)
    size = FORMATS[format_name].block_bytes
    scales = [0.0, -0.0, 6e-8, -6e-8, 65504.0, -65504.0, 1.0, 1e-3]
    blocks = [torch.tensor([*half(s), *[fill] * (size - 2)], dtype=torch.uint8) for s in scales for fill in (0, 255, 128, 127, 15, 240)]
    matrix = Matrix(torch.cat(blocks), format_name, len(blocks), 32)
    wide, reference = widened(matrix, Compiled(module).function(code)), reference_widen(matrix)
    assert torch.equal(wide.nan_to_num(nan=1e9), reference.nan_to_num(nan=1e9))
