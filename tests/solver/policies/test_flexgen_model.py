"""FlexGen's own model: its terms by hand, and every value published of what it predicts."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lmoffload.checkpoint import named_shape
from lmoffload_solver.errors import StatedError
from lmoffload_solver.policies import flexgen_memory as memory
from lmoffload_solver.policies import flexgen_model as flexgen
from lmoffload_solver.policies.flexgen_constants import GIB, TERA, FlexgenConstants, published_constants
from lmoffload_solver.policies.flexgen_model import Case, PolicyRow, Prediction, Shares
from tests.solver.policies.published import PUBLISHED, TOY, TOY_CONSTANTS, TOY_SHARES, dimensions, rows

LISTED: list[dict[str, Any]] = PUBLISHED["own_cost_model"]["predicts_tok_per_s"]
PRINTED = {256: "104.03", 512: "60.85", 1024: "32.55"}
"""Tokens per second of OPT-6.7B as the public code prints them; the list rounds these once more, half up, to one decimal."""


def predicted(entry: dict[str, Any], constants: FlexgenConstants) -> Prediction:
    row = rows(entry["model"], entry["prompt"])[0]
    return flexgen.predict(dimensions(entry["model"]), entry["prompt"], 32, row, constants)


def two_decimals(value: float) -> Decimal:
    return Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP)


def test_the_constants_are_those_listed() -> None:
    listed = dict(PUBLISHED["own_cost_model"]["constants"])
    found = published_constants().model_dump()
    assert found.pop("dtoc_weights_share") == 0.95, "listed in the equation of dtoc_g"
    for name, value in found.items():
        if name.endswith("_bytes_per_s"):
            assert value == listed.pop(name.removesuffix("_bytes_per_s") + "_gb_per_s") * GIB
        elif name.endswith("_flops_per_s"):
            assert value == listed.pop(name.removesuffix("_flops_per_s") + "_t") * TERA
        elif name.endswith("_bytes"):
            assert value == listed.pop(name.removesuffix("_bytes") + "_gb") * GIB
        else:
            assert value == listed.pop(name)
    assert not listed


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: f"{entry['model']}-{entry['prompt']}")
def test_every_listed_prediction(entry: dict[str, Any]) -> None:
    found = predicted(entry, published_constants())
    printed, listed = two_decimals(found.tokens_per_s), Decimal(str(entry["value"]))
    if entry["model"] == "opt-6.7b":
        assert str(printed) == PRINTED[entry["prompt"]]
        assert printed.quantize(Decimal("0.1"), ROUND_HALF_UP) == listed
    else:
        assert printed == listed
        assert (round(found.prefill_s), round(found.decode_s)) == (entry["prefill_s"], entry["decode_s"])


@pytest.mark.parametrize("entry", [e for e in LISTED if "value_with_dtoc_2.6" in e], ids=lambda entry: str(entry["prompt"]))
def test_every_listed_prediction_with_the_published_disk(entry: dict[str, Any]) -> None:
    found = predicted(entry, published_constants().with_disk(2.6 * GIB))
    assert two_decimals(found.tokens_per_s) == Decimal(str(entry["value_with_dtoc_2.6"]))
    assert round(found.prefill_s) == entry["prefill_s"], "prefill waits for the GPU, not for the disk"
    assert round(found.decode_s) == entry["decode_s_with_dtoc_2.6"]


def test_terms_by_hand() -> None:
    assert flexgen.ctog_prefill_s(TOY_SHARES, TOY) == pytest.approx((56 / 2 + 48 / 2) / 2)
    assert flexgen.gtoc_prefill_s(TOY_SHARES, TOY) == pytest.approx(128 * 0.75 / 4 + 48 / 2 / 8)
    assert flexgen.dtoc_prefill_s(TOY_SHARES, TOY) == pytest.approx((14 + 12) / 10)
    assert flexgen.ctod_prefill_s(TOY_SHARES, TOY) == pytest.approx(64 / 16 + 12 / 3)
    assert flexgen.compute_prefill_s(TOY) == pytest.approx(4 * (96 + 72) / 6 + 4 * 4 * 9 * 2 / 9)
    assert flexgen.ctog_decode_s(TOY_SHARES, TOY) == pytest.approx((28 + 8) / 2)
    assert flexgen.gtoc_decode_s(TOY_SHARES, TOY) == pytest.approx(8 / 8)
    assert flexgen.dtoc_decode_s(TOY_SHARES, TOY) == pytest.approx((80 + 4) / 10 + 14 / 5)
    assert flexgen.ctod_decode_s(TOY_SHARES, TOY) == pytest.approx((16 + 4) / 5)
    assert flexgen.compute_decode_s(TOY_SHARES, TOY) == pytest.approx(4 * 56 / 7 + 40 / 11 + 120 / 13)


def test_the_job_by_hand() -> None:
    """Prefill computes for 144 s of a layer (loading 28.6, storing 35); a step uploads for 18 s, then computes the longest."""
    found = flexgen.predict_shares(TOY_SHARES, TOY)
    assert found.prefill_s == pytest.approx(3 * 144)
    assert found.decode_s == pytest.approx(3 * 3 * (18 + 32 + 40 / 11 + 120 / 13))
    assert found.tokens_per_s == pytest.approx(16 / (found.prefill_s + found.decode_s))


def test_each_term_of_a_maximum_can_bind() -> None:
    slow = TOY_CONSTANTS.model_copy(update={"dtoc_bytes_per_s": 0.1})
    found = flexgen.predict_shares(TOY_SHARES, replace(TOY, constants=slow))
    assert found.prefill_s == pytest.approx(3 * (26 + 260))
    assert found.decode_s == pytest.approx(9 * (18 + 840 + 280))
    slow = TOY_CONSTANTS.model_copy(update={"gtoc_hidden_bytes_per_s": 0.1})
    found = flexgen.predict_shares(TOY_SHARES, replace(TOY, constants=slow))
    assert found.prefill_s == pytest.approx(3 * (24 + 240 + 8))
    assert found.decode_s == pytest.approx(9 * (18 + 80))
    slow = TOY_CONSTANTS.model_copy(update={"ctod_decode_bytes_per_s": 0.1})
    assert flexgen.predict_shares(TOY_SHARES, replace(TOY, constants=slow)).decode_s == pytest.approx(9 * (18 + 200))


def test_attention_on_the_cpu_slows_with_few_rows_and_small_models() -> None:
    constants = TOY_CONSTANTS.model_copy(update={"c1": 0.01, "c2": 0.02, "c3": 0.04})
    assert flexgen.cpu_flops_per_s(64, 4096, constants) == 13
    assert flexgen.cpu_flops_per_s(512, 8192, constants) == 13, "never above the constant"
    assert flexgen.cpu_flops_per_s(16, 1024, constants) == pytest.approx(13 * (1 + 4 * 0.01 - 2 * 0.02 - 2 * 0.04))
    assert flexgen.cpu_flops_per_s(1, 4096, constants.model_copy(update={"c2": 1.0})) == pytest.approx(1.3), "never below a tenth"


def test_peaks_by_hand() -> None:
    """Over 3 layers: weights 168 bytes, caches 96 bytes a token; 7 tokens at the end; a micro-batch is 2 rows."""
    device_home, host_home = 84 + 168, 42
    outputs = 2 * (48 + (12 + 36) + 12 + 24 + 18 + 12)
    assert memory.peak_bytes(TOY_SHARES, TOY) == {
        ("device", "prefill"): pytest.approx(device_home + 24 + 56 + 12 + outputs),
        ("device", "decode"): pytest.approx(device_home + 8 + 56 + 4 + 2 * 34 + 0.5 * (56 + 60 + 32)),
        ("host", "prefill"): pytest.approx(host_home + 12 + 72 + 28 + 12),
        ("host", "decode"): pytest.approx(host_home + 4 + 168 + 14 + 4 + 112 + 56 + 8),
        ("disk", "job"): pytest.approx(42 + 12 + 336),
    }
    assert memory.fits(TOY_SHARES, TOY)
    assert not memory.fits(TOY_SHARES, replace(TOY, constants=TOY_CONSTANTS.model_copy(update={"capacity_share": 0.4})))


@pytest.mark.parametrize(
    ("model", "prompt", "gib"),
    [
        ("opt-30b", 512, (18.769, 12.870, 140.831, 144.512, 0.0)),
        ("opt-175b", 256, (12.750, 6.768, 168.750, 165.391, 810.0)),
        ("opt-6.7b", 512, (12.672, 12.565, 0.0, 0.0, 0.0)),
    ],
)
def test_peaks_are_those_that_the_public_code_prints(model: str, prompt: int, gib: tuple[float, ...]) -> None:
    row = rows(model, prompt)[0]
    case = flexgen.case_of(dimensions(model), prompt, 32, row, published_constants())
    found = [peak / GIB for peak in memory.peak_bytes(row.shares, case).values()]
    if model == "opt-6.7b":
        # All is on the GPU; the public code's solver rounds what little the host stages to nothing.
        assert found[2:4] == pytest.approx([0, 0], abs=0.0005)
    assert found == pytest.approx(gib, abs=0.0006)


def test_four_bits_quarter_the_weights_alone() -> None:
    quarter = replace(TOY, weights_4bit=True)
    assert quarter.weight_bytes == 14
    assert flexgen.compute_decode_s(TOY_SHARES, quarter) == flexgen.compute_decode_s(TOY_SHARES, TOY)
    row = PolicyRow(percent=(50, 25, 25, 25, 50, 25), micro_batch=2, num_micro_batches=2, weights_4bit=True, kv_4bit=True)
    assert flexgen.predict(TOY.dims, 3, 4, row, TOY_CONSTANTS) == flexgen.predict_shares(TOY_SHARES, quarter)


def test_shares_of_a_row() -> None:
    row = PolicyRow(percent=(20, 50, 0, 100, 10, 90), micro_batch=1, num_micro_batches=1)
    assert row.shares == pytest.approx(Shares(0.2, 0.5, 0.3, 0, 1, 0, 0.1, 0.9, 0))


@pytest.mark.parametrize(
    "change", [{"percent": (60, 50, 0, 0, 0, 0)}, {"percent": (0, 0, -1, 0, 0, 0)}, {"micro_batch": 0}, {"unknown": 1}], ids=str
)
def test_rows_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PolicyRow.model_validate({"percent": (0, 0, 0, 0, 0, 0), "micro_batch": 1, "num_micro_batches": 1} | change)


def test_dimensions() -> None:
    for name in PUBLISHED["models"]:
        assert flexgen.dimensions_of(named_shape(name)) == dimensions(name)
    for name in ("llama-2-7b", "llama-3-8b"):
        with pytest.raises(StatedError, match=f"{name} differ"):
            flexgen.dimensions_of(named_shape(name))


@st.composite
def placements(draw: st.DrawFn) -> Shares:
    """Shares that add up, none of the hidden states on disk."""
    w, c, h = (sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1)))) for _ in range(3))
    return Shares(w[0], w[1] - w[0], 1 - w[1], c[0], c[1] - c[0], 1 - c[1], h[0], 1 - h[0], 0.0)


def all_terms(shares: Shares, case: Case) -> list[float]:
    terms = flexgen.prefill_terms_s(shares, case) | flexgen.decode_terms_s(shares, case)
    return [*terms.values(), *memory.peak_bytes(shares, case).values()]


@given(placements(), placements(), st.floats(0, 1))
def test_every_term_is_affine_in_the_shares(one: Shares, other: Shares, part: float) -> None:
    between = Shares(*(part * a + (1 - part) * b for a, b in zip(one, other, strict=True)))
    expected = [part * a + (1 - part) * b for a, b in zip(all_terms(one, TOY), all_terms(other, TOY), strict=True)]
    assert all_terms(between, TOY) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(placements(), st.sampled_from([name for name in TOY_CONSTANTS.model_dump() if name.endswith("_per_s")]), st.floats(1, 100))
def test_a_faster_machine_is_never_predicted_slower(shares: Shares, name: str, factor: float) -> None:
    faster = TOY_CONSTANTS.model_copy(update={name: factor * getattr(TOY_CONSTANTS, name)})
    before, after = flexgen.predict_shares(shares, TOY), flexgen.predict_shares(shares, replace(TOY, constants=faster))
    assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-12)
