"""int8_dot: rounded activations against their definition, exact products of the codes, and every way of computing them."""

from dataclasses import replace

import pytest
import torch

from lmoffload.kernels.amx import amx_is_granted
from lmoffload.kernels.code import Machine, host_machine
from lmoffload.kernels.integer import IntegerKernels, compile_integer
from lmoffload.kernels.linear import linear, reference_linear, verify_row_invariance
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.quantize import quantize
from lmoffload.kernels.tiled import Codes, pack, unpack
from lmoffload.kernels.tokens import packed_row_bytes
from lmoffload_solver.formats import QUANTIZED
from tests.kernels.weights import random_matrix

UNIT = 2.0**-24


def machines() -> list[Machine]:
    """This machine, and those whose instructions it has too."""
    host = host_machine()
    found = [host, Machine(8, False), Machine(16, False, "generic", 16)]
    if host.dots != "generic":
        found.append(Machine(8, host.halves, "maddubs", 8))
    if host.dot_width == 16:
        found.append(Machine(8, host.halves, "vnni", 8))
    if amx_is_granted():
        found.append(replace(host, amx=True))
    return found


def scales_of(x: torch.Tensor, group: int) -> torch.Tensor:
    """The scale of every group, by definition: double [rows, groups]."""
    return x.double().view(x.shape[0], -1, group).abs().amax(2) / 127


def products(kernels: IntegerKernels, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    packed_row, out = packed_row_bytes(matrix.k, QUANTIZED[matrix.format].block_elements), torch.empty(x.shape[0], matrix.n)
    room = -(-x.shape[0] // kernels.packed_multiple) * kernels.packed_multiple
    packed = torch.full((room * packed_row,), 255, dtype=torch.uint8)  # beside the rows are NaNs
    kernels.pack(x.data_ptr(), 4 * matrix.k, x.shape[0], packed.data_ptr(), packed_row, matrix.k)
    kernels.product(
        matrix.data.data_ptr(), 16 * matrix.row_bytes, matrix.n // 16, packed.data_ptr(), packed_row, x.shape[0], out.data_ptr(),
        4 * matrix.n, matrix.k,
    )  # fmt: skip
    return out


def error_bound(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """The documented error: activations off by half a scale, and rounding in fp32 of sums of the codes' parts."""
    parts = unpack(matrix.data, matrix.format, matrix.n, matrix.k)
    size = matrix.k // parts.scales.shape[1]
    scales = scales_of(x, size)
    spread = parts.codes.double().abs().view(matrix.n, -1, size).sum(2) * parts.scales.double().abs()
    if parts.minima is not None:
        spread += parts.minima.double().abs() * size
    off = (0.5 + 2.0**-12) * scales @ reference_widen(matrix).double().abs().view(matrix.n, -1, size).sum(2).T
    return off + (3 * matrix.k / size + 8) * UNIT * 127 * scales @ spread.T


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_products_of_codes_are_exact(format_name):
    """Scales of one, no minima, activations that are codes already: whole numbers that fp32 holds."""
    k = 256
    generator = torch.Generator().manual_seed(0)
    low, high, kind = (-127, 128, torch.int8) if format_name == "int8" else (0, 16, torch.uint8)
    groups = k // QUANTIZED[format_name].block_elements
    codes = torch.randint(low, high, (32, k), generator=generator, dtype=kind)
    ones = torch.ones(32, groups, dtype=torch.float16)
    matrix = Matrix(pack(Codes(codes, ones, None if format_name == "int8" else torch.zeros_like(ones)), format_name), format_name, 32, k)
    x = torch.randint(-127, 128, (29, k), generator=generator).float()
    x.view(29, groups, -1)[:, :, 0] = 127
    for machine in machines():
        assert torch.equal(products(compile_integer(format_name, machine), x, matrix), x @ codes.float().T), machine


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_saturation_at_the_ends_of_the_codes(format_name):
    """Every code at an end, with every sign: the sums that saturate where instructions are used carelessly."""
    k, end = 256, -127.0 if format_name == "int8" else 0.0
    most = 127.0 if format_name == "int8" else 15.0
    weights = torch.stack([torch.full((k,), most), torch.full((k,), end), torch.tensor([most, end]).repeat(k // 2)]).repeat(6, 1)[:16]
    weights[:, 0], weights[:, 1] = most, end  # fixes the scale at one and the minimum at the end
    weights = weights.view(16, -1, QUANTIZED[format_name].block_elements)
    weights[:, :, 0], weights[:, :, 1] = most, end
    weights = weights.reshape(16, k)
    matrix = Matrix(quantize(weights, format_name), format_name, 16, k)
    assert torch.equal(reference_widen(matrix), weights)
    x = torch.stack([torch.full((k,), 127.0), torch.full((k,), -127.0), torch.tensor([127.0, -127.0]).repeat(k // 2)])
    for machine in machines():
        assert torch.equal(products(compile_integer(format_name, machine), x, matrix), x @ weights.T), machine


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_all_instructions_give_the_same_bits(format_name):
    matrix, x = random_matrix(format_name, 48, 384), torch.randn(31, 384, generator=torch.Generator().manual_seed(1))
    found = [products(compile_integer(format_name, machine), x, matrix) for machine in machines()]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_error(format_name, pool):
    k = 1152
    for n in (1, 16, 37, 300):
        matrix = random_matrix(format_name, n, k, seed=n, offset=n % 3)
        for rows in (1, 2, 5, 12, 13, 130):
            x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
            x[0, 7] = 1e4  # one huge channel
            out, exact = linear(x, matrix, "int8_dot", pool), x.double() @ reference_widen(matrix).double().T
            assert ((out - exact).abs() <= error_bound(x, matrix)).all()


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_adversarial_rows(format_name, pool):
    matrix, x = random_matrix(format_name, 40, 256), torch.zeros(6, 256)
    x[1] = 1e-35
    x[2], x[2, 3] = 1e-30, 1e30
    x[3, 5], x[4, 9] = float("nan"), float("inf")
    x[5] = 3e38
    out = linear(x, matrix, "int8_dot", pool)
    assert (out[:2] == 0).all() and out[2].isfinite().all() and out[3:5].isnan().all()
    bound = error_bound(x[2:3], matrix)
    assert ((out[2].double() - x[2].double() @ reference_widen(matrix).double().T).abs() <= bound[0]).all()


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_a_huge_activation_costs_its_group_alone(format_name, pool):
    """Outputs in which it has no part, because its weights are zero, are as if it were not there."""
    group = QUANTIZED[format_name].block_elements
    weights = torch.randn(16, 3 * group, generator=torch.Generator().manual_seed(2))
    weights[:, :group] = 0
    matrix, x = Matrix(quantize(weights, format_name), format_name, 16, 3 * group), torch.randn(4, 3 * group)
    huge = x.clone()
    huge[:, 5] = 1e6
    assert torch.equal(linear(huge, matrix, "int8_dot", pool), linear(x, matrix, "int8_dot", pool))


@pytest.mark.parametrize("format_name", QUANTIZED)
@pytest.mark.parametrize("k", [128, 2048])
def test_bits_of_a_row_do_not_depend_on_its_company(format_name, k, pool):
    matrix, x = random_matrix(format_name, 33, k), torch.randn(900, k, generator=torch.Generator().manual_seed(k))
    whole = linear(x[:300], matrix, "int8_dot", pool)
    for rows in (*range(1, 40), 64, 127, 128, 192, 300):
        place, row = rows * 31 % rows if rows % 2 else rows - 1, rows * 17 % 300
        company = x[300 : 300 + rows].clone()
        company[place] = x[row]
        assert torch.equal(linear(company, matrix, "int8_dot", pool)[place], whole[row]), rows
    assert verify_row_invariance("int8_dot", format_name, 96, k)


def test_threads_row_order_and_bias():
    order = torch.randperm(700, generator=torch.Generator().manual_seed(3))
    x, bias = torch.randn(150, 2048, generator=torch.Generator().manual_seed(0)), torch.arange(700.0)
    plain, ordered = random_matrix("int4-g64", 700, 2048), random_matrix("int4-g64", 700, 2048, row_order=order)
    with Pool(1) as one, Pool(3) as three:
        out = linear(x, plain, "int8_dot", one)
        assert torch.equal(linear(x, plain, "int8_dot", three), out)
        assert torch.equal(linear(x, ordered, "int8_dot", three, bias), out[:, order] + bias)
    size = reference_linear(x.abs(), plain).abs().mean()
    assert (out - reference_linear(x, plain)).abs().max() < size
