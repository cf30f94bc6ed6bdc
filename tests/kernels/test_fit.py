"""Groups fitted to what their columns count: exact where 16 levels suffice, never worse than the nearest, better where columns differ."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload.kernels.fit import fit, nearest_codes
from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.kernels.quantize import quantize
from lmoffload_solver.formats import QUANTIZED


def widened(weights: torch.Tensor, format_name: str, squares: torch.Tensor | None = None) -> torch.Tensor:
    return reference_widen(Matrix(quantize(weights, format_name, squares), format_name, *weights.shape))


def test_one_group_by_hand():
    """A column that counts a million times the others, in the middle of two levels of the whole range, is met where they are not."""
    weights, squares = torch.tensor([0.0, 15.0, *[4.5] * 30]), torch.ones(32)
    squares[2:] = 1e6
    scale, least = fit(weights.view(1, 1, 32), squares.view(1, 32))
    codes = nearest_codes(weights.view(1, 1, 32), scale, least)
    wide = (codes * scale + least).view(-1)
    assert (wide[2:] - 4.5).abs().max() < 0.01 and (wide[:2] - weights[:2]).abs().max() < 3


def test_weights_on_a_grid_of_sixteen_levels_come_back():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 64), generator=generator).float()
    codes[:, 0], codes[:, 1] = 0, 15
    weights = codes * 0.25 - 2
    assert torch.equal(widened(weights, "int4-g64", torch.rand(64, generator=generator)), weights)


def test_degenerate_groups():
    weights = torch.stack([torch.zeros(64), torch.full((64,), 0.3), torch.eye(1, 64)[0] * 6e4, torch.full((64,), 1e-9)])
    for squares in (torch.zeros(64), torch.ones(64), torch.eye(1, 64)[0] * 1e30):
        wide = widened(weights, "int4-g64", squares)
        assert wide.isfinite().all()
        torch.testing.assert_close(wide[:2], weights[:2], rtol=1e-3, atol=0)
        assert wide[3].abs().max() < 1e-7


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([name for name in QUANTIZED if name != "int8"]), st.integers(0, 2**31), st.floats(0, 3))
def test_never_worse_than_the_whole_range_where_it_counts(format_name, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    k = 2 * QUANTIZED[format_name].block_elements
    weights, squares = torch.randn(20, k, generator=generator), torch.exp(spread * torch.randn(k, generator=generator))
    fitted, nearest = (
        ((widened(weights, format_name, chosen) - weights).square() * squares).view(20, 2, -1).sum(2) for chosen in (squares, None)
    )
    assert (fitted <= 1.02 * nearest + 1e-9).all()  # the nearest takes minima below the range's end, which may be worth as much
    assert fitted.sum() < 0.99 * nearest.sum()


def test_columns_that_count_are_kept_better():
    generator = torch.Generator().manual_seed(1)
    weights, squares = torch.randn(64, 128, generator=generator), torch.ones(128)
    squares[::16] = 1000
    errors = {chosen is None: (widened(weights, "int4-g64", chosen) - weights).square() for chosen in (squares, None)}
    assert errors[False][:, ::16].mean() < 0.3 * errors[True][:, ::16].mean()


def test_int8_is_rounded_to_the_nearest_whatever_counts():
    weights = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(quantize(weights, "int8", torch.rand(64)), quantize(weights, "int8"))
