"""The weights that linear layers are measured with."""

from __future__ import annotations

import pytest
import torch

from lmoffload.kernels.matrix import Matrix, reference_widen
from lmoffload.profiler.weights import WeightSlab, random_blocks
from lmoffload_solver.formats import FORMATS, QUANTIZED, stored_bytes


@pytest.mark.parametrize("format_name", [*FORMATS, *QUANTIZED])
def test_every_format_widens_to_small_finite_numbers(format_name: str) -> None:
    n, k = 96, 256
    matrix = Matrix(random_blocks(format_name)[: stored_bytes((n, k), format_name)].clone(), format_name, n, k)
    wide = reference_widen(matrix)
    assert bool(wide.isfinite().all())
    assert 1e-4 < float(wide.std()) < 0.5
    assert not torch.equal(wide[0], wide[1])


def test_a_slab_hands_out_different_memory_in_turn() -> None:
    slab = WeightSlab(0)
    matrices = slab.matrices("bf16", 1536, 576)
    size = stored_bytes((1536, 576), "bf16")
    whole = 4 * 5632 * 2048 // size
    places = [next(matrices).data.data_ptr() for _ in range(whole + 1)]
    assert len(set(places[:-1])) == whole
    assert places[-1] == places[0]
