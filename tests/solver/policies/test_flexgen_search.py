"""FlexGen's own search: the choices of its public code, its program against other shares, and what it says when nothing fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings

from lmoffload_solver.errors import InfeasibleError
from lmoffload_solver.policies.flexgen_constants import GIB, published_constants
from lmoffload_solver.policies.flexgen_memory import fits
from lmoffload_solver.policies.flexgen_model import Case, Shares, predict, predict_shares
from lmoffload_solver.policies.flexgen_program import FlexgenProgram, best_shares, shortfall_bytes
from lmoffload_solver.policies.flexgen_search import FlexgenSearch, search
from tests.solver.policies.published import TOY, TOY_CONSTANTS, dimensions
from tests.solver.policies.test_flexgen_model import placements

LARGE_CASE = Case(dimensions("opt-30b"), 512, 32, 16, 11, published_constants())


def relaxed(case: Case, part: float = 1e-6) -> Case:
    """With capacities larger by the solver's tolerance."""
    constants = case.constants
    return replace(case, constants=constants.model_copy(update={"capacity_share": constants.capacity_share * (1 + part)}))


@pytest.mark.parametrize(
    ("model", "prompt", "four_bits", "batch", "tokens_per_s"),
    [
        ("opt-6.7b", 1024, False, (32, 9), "14.29"),
        ("opt-30b", 512, False, (16, 11), "7.12"),
        ("opt-30b", 1024, False, (8, 11), "3.67"),
        ("opt-175b", 1024, False, (1, 223), "0.09"),
        ("opt-30b", 512, True, (32, 7), "8.31"),
    ],
)
def test_the_choices_of_the_public_code(model: str, prompt: int, four_bits: bool, batch: tuple[int, int], tokens_per_s: str) -> None:
    """What experimental/cost_model.py at 004ffef prints for 204 GB of host memory (and --compress-w)."""
    found = search(dimensions(model), prompt, 32, published_constants(), weights_4bit=four_bits)
    assert (found.row.micro_batch, found.row.num_micro_batches) == batch
    assert f"{found.prediction.tokens_per_s:.2f}" == tokens_per_s
    again = predict(dimensions(model), prompt, 32, found.row, published_constants())
    assert again.tokens_per_s == pytest.approx(found.prediction.tokens_per_s)


def test_the_shares_of_the_public_code() -> None:
    """OPT-30B, 512 tokens, 11 micro-batches of 16 rows: it prints wg 0.14640639, wc 0.85359361, cc 0.94620565, where the host is full;
    down to 0.94618937, where reading the disk takes as long as computing, every cc is as good."""
    shares = best_shares(LARGE_CASE)
    assert shares is not None
    assert (shares.wg, shares.wc, shares.hc) == pytest.approx((0.14640639, 0.85359361, 1), abs=1e-6)
    assert 0.94618936 <= shares.cc <= 0.94620566


@pytest.mark.parametrize("case", [TOY, LARGE_CASE], ids=["toy", "opt-30b"])
def test_no_shares_beat_the_program(case: Case) -> None:
    shares = best_shares(case)
    assert shares is not None
    assert fits(shares, relaxed(case))
    best = predict_shares(shares, case).tokens_per_s

    @settings(max_examples=300)
    @given(placements())
    def never_beaten(other: Shares) -> None:
        if fits(other, case):
            assert predict_shares(other, case).tokens_per_s <= best * (1 + 1e-6)

    never_beaten()


def test_the_program_against_a_grid() -> None:
    """The best of all shares in tenths is below the program's, and near it where the optimum is no corner of the grid."""
    shares = best_shares(TOY)
    assert shares is not None
    best = predict_shares(shares, TOY).tokens_per_s
    thirds = [(g / 10, c / 10, (10 - g - c) / 10) for g in range(11) for c in range(11 - g)]
    halves = [(g / 10, (10 - g) / 10, 0.0) for g in range(0, 11, 5)]
    candidates = (Shares(*w, *c, *h) for w, c, h in product(thirds, thirds, halves))
    grid = max(predict_shares(s, TOY).tokens_per_s for s in candidates if fits(s, TOY))
    assert grid <= best * (1 + 1e-6)
    assert grid >= 0.9 * best


def test_what_fits_stays_on_the_gpu() -> None:
    """With a slow link and a large device nothing leaves it."""
    large = replace(TOY, constants=TOY_CONSTANTS.model_copy(update={"gpu_bytes": 1e6, "cpu_flops_per_s": 1}))
    shares = best_shares(large)
    assert shares is not None
    assert (shares.wg, shares.cg, shares.hg) == pytest.approx((1, 1, 1), abs=1e-6)


def test_weights_leave_just_as_far_as_the_gpu_is_short() -> None:
    """Caches and hidden states are too dear to move. All there, decode needs 168 + 16 + 672 bytes of home and 2·34 + 2·148 at work; a share
    of the weights that leaves frees 3·56 bytes and takes 2·56 for two layers in flight, so 28 bytes less keep half of them."""
    need = 168 + 16 + 672 + 2 * 34 + 2 * 148
    dear = {"gtoc_cache_bytes_per_s": 1e-3, "gtoc_hidden_bytes_per_s": 1e-3, "cpu_flops_per_s": 1e-3}
    room = {"gpu_bytes": (need - 28) / 0.5, "cpu_bytes": 1e6, "disk_bytes": 1e6}
    shares = best_shares(replace(TOY, constants=TOY_CONSTANTS.model_copy(update=dear | room)))
    assert shares is not None
    assert (shares.wg, shares.cg, shares.hg) == pytest.approx((0.5, 1, 1), abs=1e-6)


def test_rows_are_named() -> None:
    program = FlexgenProgram(TOY)
    assert {row.name for row in program.model.constraints()} == {
        *("placed.w", "placed.c", "placed.h", "placed.hn"),
        *("capacity.device.prefill", "capacity.device.decode", "capacity.host.prefill", "capacity.host.decode", "capacity.disk.job"),
        *("Tpre.load", "Tpre.store", "Tpre.compute", "Tgen.gtoc", "Tgen.dtoc", "Tgen.ctod", "Tgen.compute"),
    }


def test_the_most_micro_batches() -> None:
    walk = FlexgenSearch(TOY.dims, TOY.prompt, TOY.generated, TOY_CONSTANTS)
    found = []
    for micro_batch in (1, 2, 3, 4, 8):
        scanned = 0
        while best_shares(replace(TOY, micro_batch=micro_batch, num_micro_batches=scanned + 1)) is not None:
            scanned += 1
        assert walk.most_micro_batches(micro_batch) == scanned
        found.append(scanned)
    assert found[0] > 3 and found[-1] == 0


def test_where_nothing_fits_the_memory_and_its_lack_are_named() -> None:
    constants = published_constants().model_copy(update={"disk_bytes": 100 * GIB})
    case = Case(dimensions("opt-175b"), 512, 32, 1, 1, constants)
    lacking = shortfall_bytes(case)
    assert set(lacking) == {"disk"}
    with pytest.raises(InfeasibleError, match=rf"lacks {lacking['disk'] / GIB:.2f} GiB of disk for a single row"):
        search(case.dims, 512, 32, constants)
    enough = constants.model_copy(update={"disk_bytes": constants.disk_bytes + 1.001 * lacking["disk"] / constants.capacity_share})
    assert best_shares(replace(case, constants=enough)) is not None
    too_little = constants.model_copy(update={"disk_bytes": constants.disk_bytes + 0.99 * lacking["disk"] / constants.capacity_share})
    assert best_shares(replace(case, constants=too_little)) is None


def test_a_device_too_small_for_its_working_set_is_named() -> None:
    constants = published_constants().model_copy(update={"gpu_bytes": 2 * GIB})
    assert set(shortfall_bytes(Case(dimensions("opt-175b"), 512, 32, 1, 1, constants))) == {"device"}
    with pytest.raises(InfeasibleError, match="GiB of device memory"):
        search(dimensions("opt-175b"), 512, 32, constants)


def test_a_machine_without_a_disk() -> None:
    constants = published_constants().model_copy(update={"disk_bytes": 0.0})
    case = replace(LARGE_CASE, num_micro_batches=10, constants=constants)
    shares = best_shares(case)
    assert shares is not None
    assert (shares.wn, shares.cn) == pytest.approx((0, 0), abs=1e-6)
    assert best_shares(LARGE_CASE) is not None
    assert best_shares(replace(case, num_micro_batches=11)) is None, "its last micro-batch lay on disk"
    assert set(shortfall_bytes(replace(case, num_micro_batches=11))) == {"disk"}


def test_a_job_of_one_token_has_no_decode() -> None:
    found = search(TOY.dims, TOY.prompt, 1, TOY_CONSTANTS)
    assert found.prediction.decode_s == 0
    assert found.prediction.tokens_per_s > 0
