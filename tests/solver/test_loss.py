"""What a table of losses says of parts, alone and together."""

import pytest

from lmoffload_solver.errors import StatedError
from lmoffload_solver.loss import Loss, LossTable, MeasuredText, Part, allowed, loss_of
from lmoffload_solver.plan import Named
from lmoffload_solver.value import parse_value


def loss(what, format_name, value, activations="fp32"):
    return Loss(what=what, format=format_name, activations=activations, perplexity=20 * (1 + value), loss=value, equal_tokens=0.9)


TABLE = LossTable(
    model=Named(name="toy", digest="0" * 32),
    text=MeasuredText(name="toy text", digest="1" * 16, tokens=100),
    reference_perplexity=20.0,
    losses=(
        loss("weights", "int8", 0.004), loss("weights", "int8", 0.011, "int8"), loss("weights", "int4-g64", 0.08), loss("kv", "int8", 0.001)
    ),
)  # fmt: skip


def test_what_is_not_in_the_table_is_unknown_and_what_is_exact_costs_nothing():
    assert loss_of(TABLE, Part("weights", "int8")) == 0.004
    assert loss_of(TABLE, Part("weights", "int8", "int8")) == 0.011
    assert loss_of(TABLE, Part("weights", "int4-g32")) is None and loss_of(TABLE, Part("kv", "bf16")) is None
    assert loss_of(None, Part("weights", "bf16"), Part("kv", "fp32")) == 0.0
    assert loss_of(None, Part("weights", "int8")) is None


def test_parts_add_up_and_one_unknown_makes_the_sum_unknown():
    assert loss_of(TABLE, Part("weights", "int4-g64"), Part("kv", "int8")) == pytest.approx(0.081)
    assert loss_of(TABLE, Part("weights", "int4-g64"), Part("kv", "int4-g32")) is None


def test_a_class_takes_what_is_within_its_bound_or_unknown():
    assert allowed(TABLE, "int8", Part("weights", "int8")) and not allowed(TABLE, "int8", Part("weights", "int8", "int8"))
    assert allowed(TABLE, "int4", Part("weights", "int8", "int8")) and allowed(TABLE, "int4", Part("weights", "int4-g64"))
    assert allowed(TABLE, "int4", Part("weights", "int4-g128")) and allowed(None, "int8", Part("weights", "int8"))
    assert allowed(TABLE, "any", Part("weights", "int8", "int8"))
    assert allowed(TABLE, "exact", Part("weights", "q4_0")) and not allowed(TABLE, "exact", Part("kv", "int8"))


def test_the_document_comes_back_and_a_part_stands_once():
    text = TABLE.model_dump_json()
    assert parse_value(LossTable, text, "table") == TABLE and '"schema":1' in text
    with pytest.raises(StatedError, match="twice"):
        parse_value(LossTable, text.replace("int4-g64", "int8"), "table")
