"""Linear kernels: error against the reference, and bits that do not depend on company."""

import pytest
import torch

from lmoffload.kernels import linear as linear_module
from lmoffload.kernels import tiles
from lmoffload.kernels.linear import KERNELS, kernels_for, linear, reference_linear, row_ranges, verify_row_invariance
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.product import COLUMN_BLOCK
from lmoffload.kernels.tiles import blas_is_steady
from lmoffload_solver.formats import FORMATS, QUANTIZED, format_of
from tests.kernels.weights import random_data, random_matrix

ALL_FORMATS = [*FORMATS, *QUANTIZED]
PAIRS = [(kernel, name) for name in ALL_FORMATS for kernel in kernels_for(name) if kernel != "int8_dot"]
"""int8_dot, which rounds activations, has tests of its own."""

UNIT = 2.0**-24


def fit(k: int, format_name: str) -> int:
    """The nearest whole number of the format's blocks that is no smaller."""
    block = format_of(format_name).block_elements
    return -(-k // block) * block


def error_bound(kernel: str, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """The documented error: so many units of rounding of the sum of the products' sizes."""
    sizes = x.double().abs() @ reference_widen(matrix).double().abs().T
    steps = matrix.k if kernel != "fused_dot" else min(matrix.k, COLUMN_BLOCK) // 8 + 8 + matrix.k // COLUMN_BLOCK + 32
    if kernel == "fused_dot" and matrix.format in QUANTIZED:
        group = QUANTIZED[matrix.format].block_elements
        steps = group + matrix.k // group
    return (steps + 2) * UNIT * sizes + matrix.k * 2.0**-149


def assert_within_error(kernel: str, x: torch.Tensor, matrix: Matrix, pool: Pool) -> None:
    exact = x.double() @ reference_widen(matrix).double().T
    out = linear(x, matrix, kernel, pool)
    assert out.shape == exact.shape and out.is_contiguous() and out.dtype == torch.float32
    assert ((out - exact).abs() <= error_bound(kernel, x, matrix)).all()


@pytest.mark.parametrize(("kernel", "format_name"), PAIRS)
def test_error_on_random_input(kernel, format_name, pool):
    for n, k in ((1, fit(32, format_name)), (37, fit(96, format_name)), (300, fit(1056, format_name)), (40, 5632)):
        matrix = random_matrix(format_name, n, k, seed=n)
        for rows in (1, 2, 3, 7, 13, 130) if k < 5632 else (1, 9, 40):
            assert_within_error(kernel, torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)), matrix, pool)


@pytest.mark.parametrize(("kernel", "format_name"), PAIRS)
def test_error_on_adversarial_input(kernel, format_name, pool):
    k, n = fit(1120, format_name), 40
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    x[1, 77] = 1e6  # one huge channel
    x[2] *= 1e-39  # subnormal numbers
    x[3, 0], x[3, 1:] = 1e30, 1e-30
    x[4] = torch.tensor([1.0, -1.0]).repeat(k // 2)  # cancels
    matrix = random_matrix(format_name, n, k)
    assert_within_error(kernel, x, matrix, pool)
    assert (linear(x, matrix, kernel, pool)[0] == 0).all()


@pytest.mark.parametrize(("kernel", "format_name"), [p for p in PAIRS if p[1] in ("fp32", "bf16", "fp16")])
def test_sizes_that_fill_no_vector(kernel, format_name, pool):
    for n, k in ((3, 1), (5, 7), (9, 50), (17, 1063)):
        matrix = random_matrix(format_name, n, k, seed=k)
        for rows in (1, 5, 8):
            assert_within_error(kernel, torch.randn(rows, k, generator=torch.Generator().manual_seed(k)), matrix, pool)


@pytest.mark.parametrize(("kernel", "format_name"), PAIRS)
@pytest.mark.parametrize("k", [32, 576, 2048, 14336])
def test_bits_of_a_row_do_not_depend_on_its_company(kernel, format_name, k, pool):
    generator, k = torch.Generator().manual_seed(k), fit(k, format_name)
    matrix, x = random_matrix(format_name, 33, k), torch.randn(600, k, generator=generator)
    whole = linear(x[:300], matrix, kernel, pool)
    counts = range(1, 301) if k <= 96 else (*range(1, 18), 31, 64, 65, 127, 128, 129, 131, 132, 191, 192, 193, 256, 300)
    for rows in counts:
        place = rows * 31 % rows if rows % 2 else rows - 1
        row = rows * 17 % 300
        company = x[300 : 300 + rows].clone()
        company[place] = x[row]
        assert torch.equal(linear(company, matrix, kernel, pool)[place], whole[row]), (rows, place)


@pytest.mark.parametrize("k", [50, 100])
@pytest.mark.parametrize(("kernel", "format_name"), [p for p in PAIRS if p[1] in ("fp32", "bf16")])
def test_bits_where_columns_fill_no_vector(kernel, format_name, k, pool):
    matrix, x = random_matrix(format_name, 20, k), torch.randn(300, k, generator=torch.Generator().manual_seed(k))
    whole = linear(x, matrix, kernel, pool)
    for rows in range(1, 150):
        assert torch.equal(linear(x[rows : 2 * rows], matrix, kernel, pool), whole[rows : 2 * rows])


@pytest.mark.parametrize("format_name", ALL_FORMATS)
def test_fused_dot_gives_the_same_bits_with_any_number_of_threads(format_name):
    matrix, x = random_matrix(format_name, 700, 4096), torch.randn(20, 4096, generator=torch.Generator().manual_seed(0))
    assert len(row_ranges(700, 32, 4096 * 20, 3)) > 1
    with Pool(1) as one, Pool(3) as three:
        assert torch.equal(linear(x, matrix, "fused_dot", one), linear(x, matrix, "fused_dot", three))


@pytest.mark.parametrize(("kernel", "format_name"), PAIRS)
def test_weights_at_any_address(kernel, format_name, pool):
    k = fit(96, format_name)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(0))
    straight = linear(x, random_matrix(format_name, 40, k), kernel, pool)
    for offset in (1, 2, 4, 18, 34):
        assert torch.equal(linear(x, random_matrix(format_name, 40, k, offset=offset), kernel, pool), straight)


@pytest.mark.parametrize(("kernel", "format_name"), PAIRS)
def test_row_order_and_bias(kernel, format_name, pool):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    k = fit(64, format_name)
    x, bias = torch.randn(7, k, generator=torch.Generator().manual_seed(0)), torch.arange(40.0)
    plain = linear(x, random_matrix(format_name, 40, k), kernel, pool)
    ordered = random_matrix(format_name, 40, k, row_order=order)
    assert torch.equal(linear(x, ordered, kernel, pool, bias), plain[:, order] + bias)
    assert torch.allclose(linear(x, ordered, kernel, pool, bias), reference_linear(x, ordered, bias), rtol=1e-4, atol=1e-4)


def test_pieces_of_rows_make_the_whole(pool):
    matrix, x = random_matrix("bf16", 50, 64), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    pieces = [linear(x, matrix.rows(first, end), "fused_dot", pool) for first, end in ((0, 17), (17, 50))]
    assert torch.equal(torch.cat(pieces, dim=1), linear(x, matrix, "fused_dot", pool))


def test_nan_and_infinity_are_not_hidden(pool):
    data = random_data("fp32", 4, 64).clone()
    data.view(torch.float32)[64] = float("nan")
    data.view(torch.float32)[128] = float("inf")
    for kernel in kernels_for("fp32"):
        out = linear(torch.ones(2, 64), Matrix(data, "fp32", 4, 64), kernel, pool)
        assert out[:, 1].isnan().all() and out[:, 2].isinf().all() and out[:, [0, 3]].isfinite().all()


@pytest.mark.parametrize(("kernel", "format_name"), PAIRS)
def test_verify_row_invariance(kernel, format_name):
    assert verify_row_invariance(kernel, format_name, 96, fit(576, format_name))


def test_an_unsteady_blas_is_replaced(monkeypatch, pool):
    """A machine whose BLAS sums otherwise for other M: the promise is kept by `fused_dot`."""
    monkeypatch.setattr(linear_module, "steady_shape", lambda n, k: False)
    matrix, x = random_matrix("bf16", 40, 576), torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x, matrix, "widen_tiles", pool), linear(x, matrix, "fused_dot", pool))


def test_blas_check_sees_other_bits(monkeypatch):
    """A BLAS that sums in another order from 64 columns on, in two blocks of K, is found out."""
    assert blas_is_steady.__wrapped__(64, 512) is True

    def blocked(tile: torch.Tensor, xt: torch.Tensor) -> torch.Tensor:
        return tile @ xt if xt.shape[1] < 64 else tile[:, :100] @ xt[:100] + tile[:, 100:] @ xt[100:]

    monkeypatch.setattr(tiles.torch, "mm", blocked)
    assert blas_is_steady.__wrapped__(64, 512) is False


def test_jobs_cover_every_row_once():
    for n, unit, work, threads in ((1, 32, 32, 2), (576, 80, 576, 2), (49152, 32, 9216, 2), (5632, 512, 614400, 7), (31, 32, 10**7, 2)):
        ranges = row_ranges(n, unit, work, threads)
        assert [first for first, _ in ranges] == [0, *[end for _, end in ranges[:-1]]] and ranges[-1][1] == n
        assert all(first < end and first % unit == 0 for first, end in ranges)


def test_kernels_of_a_format():
    assert kernels_for("fp32") == ("fp32", "fused_dot")
    assert all(kernels_for(f) == ("widen_tiles", "fused_dot") for f in FORMATS if f != "fp32")
    assert all(kernels_for(f) == ("widen_tiles", "fused_dot", "int8_dot") for f in QUANTIZED)
    assert set(KERNELS) == {"fp32", "widen_tiles", "fused_dot", "int8_dot"}
