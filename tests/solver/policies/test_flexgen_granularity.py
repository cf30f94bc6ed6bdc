"""FlexGen's percentages as whole tensors: the listed shares, small modules by hand, and what holds always."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload.checkpoint import named_shape
from lmoffload_solver.policies.flexgen_granularity import achieved_percent, homes_of_sizes, modules_of, tensor_homes
from tests.solver.policies.published import PUBLISHED

LISTED: list[tuple[float, float]] = [tuple(pair) for pair in PUBLISHED["requested_vs_achieved_gpu_weight_percent"]]
RANK = {"disk": 0, "host": 1, "device": 2}


@pytest.mark.parametrize("model", PUBLISHED["models"])
@pytest.mark.parametrize(("requested", "achieved"), LISTED)
def test_every_listed_share(model: str, requested: float, achieved: float) -> None:
    found = achieved_percent(named_shape(model), requested, 100 - requested)
    assert round(found["device"], 1) == achieved
    assert found["device"] + found["host"] == pytest.approx(100)


def test_a_module_by_hand() -> None:
    """Sizes 10, 20, 30, 40 have their middles at 5, 20, 45 and 80 percent."""
    sizes = (10, 20, 30, 40)
    assert homes_of_sizes(sizes, 0, 0) == ("disk",) * 4
    assert homes_of_sizes(sizes, 100, 0) == ("device",) * 4
    assert homes_of_sizes(sizes, 20, 60) == ("disk", "host", "host", "device"), "a middle on a boundary goes to the tier beyond it"
    assert homes_of_sizes(sizes, 20.1, 60) == ("disk", "host", "host", "device")
    assert homes_of_sizes(sizes, 19.9, 60) == ("disk", "disk", "host", "host"), "80 lies below 100 − 19.9"
    assert homes_of_sizes(sizes, 50, 0) == ("disk", "disk", "disk", "device")


def test_the_tensors_of_a_layer() -> None:
    """20 % on the device: the output projection, whose middle is at 87.5 %, and vectors at the ends; of the MLP, fc2 at 75 % is not."""
    homes = tensor_homes(named_shape("opt-30b"), 20, 80)
    layer = {name.split(".7.")[1] for name, tier in homes.items() if ".layers.7." in name and tier == "device"}
    assert layer == {
        *("self_attn.out_proj.weight", "self_attn.out_proj.bias", "self_attn_layer_norm.weight", "self_attn_layer_norm.bias"),
        *("fc2.bias", "final_layer_norm.weight", "final_layer_norm.bias"),
    }


def test_modules_hold_every_tensor_once_in_flexgens_order() -> None:
    shape = named_shape("opt-6.7b")
    modules = modules_of(shape)
    assert sorted(t.name for module in modules for t in module) == sorted(t.name for t in shape.tensors)
    assert len(modules) == 2 + 2 * shape.num_layers
    assert [t.name.split(".0.")[1] for t in modules[1] if t.is_matrix] == [f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "out")]
    assert modules[1][-1].name.endswith("self_attn_layer_norm.bias")
    assert [t.name.split(".0.")[1] for t in modules[2] if t.is_matrix] == ["fc1.weight", "fc2.weight"]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=12), st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_what_holds_of_every_module(sizes: list[int], one: float, other: float, more: float) -> None:
    device, host = min(one, other), max(one, other) - min(one, other)
    homes = homes_of_sizes(sizes, device, host)
    ranks = [RANK[home] for home in homes]
    assert ranks == sorted(ranks), "disk, then host, then device"
    on_device = sum(size for size, home in zip(sizes, homes, strict=True) if home == "device")
    assert abs(on_device - device / 100 * sum(sizes)) <= max(sizes) / 2 + 1e-6 * sum(sizes), "off by half a tensor at most"
    richer = homes_of_sizes(sizes, device, min(100 - device, host + more))
    assert all(RANK[b] >= RANK[a] for a, b in zip(homes, richer, strict=True)), "more host memory moves nothing outward"
