"""Curves to seconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload_solver.costs import Contention, DiskCosts, LinearCosts, disk_of, num_requests, rate_at
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import LinearCurve
from lmoffload_solver.threads import compute_choices, disk_threads
from tests.solver.toys import MIB, curve, make_machine, make_model


def test_rate_is_log_log_between_points_and_flat_beyond() -> None:
    rates = rate_at(curve((4, 16), (100.0, 400.0)), np.array([1.0, 4.0, 8.0, 16.0, 99.0]))
    assert rates == pytest.approx([100, 100, 200, 400, 400])


def test_linear_layer_of_a_measured_shape() -> None:
    costs = LinearCosts([LinearCurve(kernel="a", format="bf16", threads=2, n=8, k=4, flops_per_s=curve((4, 16), (1e3, 4e3)))], 2)
    seconds = costs.seconds("a", "bf16", 8, 4, np.array([4.0, 8.0, 16.0, 64.0]))
    assert seconds == pytest.approx([2 * 4 * 32 / 1e3, 2 * 8 * 32 / 2e3, 2 * 16 * 32 / 4e3, 2 * 64 * 32 / 4e3])


def test_linear_layer_between_measured_shapes() -> None:
    curves = [
        LinearCurve(kernel="a", format="bf16", threads=1, n=n, k=10, flops_per_s=curve((4,), (rate,)))
        for n, rate in ((10, 1e3), (1000, 1e5))
    ]
    costs = LinearCosts(curves, 1)
    assert costs.rate("a", "bf16", 100, 10, np.array([4.0])) == pytest.approx([1e4]), "halfway in the logarithm of weights"
    assert costs.rate("a", "bf16", 5, 10, np.array([4.0])) == pytest.approx([1e3])
    assert costs.rate("a", "bf16", 9999, 10, np.array([4.0])) == pytest.approx([1e5])


def test_a_kernel_that_does_not_take_a_format_is_replaced() -> None:
    costs = LinearCosts(make_machine().linear, 2)
    assert costs.kernel_for("narrow", "bf16") == "narrow"
    assert costs.kernel_for("narrow", "fp32") == "wide"
    curves = [
        LinearCurve(kernel=name, format="fp32", threads=1, n=8, k=8, flops_per_s=curve((4,), (1e9,))) for name in ("fp32", "fused_dot")
    ]
    assert LinearCosts(curves, 1).kernel_for("widen_tiles", "fp32") == "fused_dot", "as the executor chooses"


def test_disk_reads_by_size_and_requests_in_flight() -> None:
    disk = DiskCosts(make_machine().disks[0], 2)
    assert disk.best_rate(1e9) == pytest.approx(0.98e8)
    assert disk.best_rate(65536) == pytest.approx(0.49e8), "small reads are slower"
    assert disk.read_seconds(8 * MIB, 2) == pytest.approx(8 * MIB / 0.98e8)
    assert disk.read_seconds(65536, 1) == pytest.approx(65536 / 0.3e8), "a single small request"
    assert disk.read_seconds(0, 0) == 0
    assert num_requests([1, 4 * MIB, 4 * MIB + 1]) == 4


def test_disk_of_a_file_system() -> None:
    machine = make_machine()
    assert disk_of(machine, None) is machine.disks[0]
    with pytest.raises(StatedError, match="/data was not measured"):
        disk_of(machine, "/data")


def test_threads() -> None:
    machine = make_machine()
    assert disk_threads(machine.disks[0]) == 2, "0.98 of the best is near enough, 0.6 is not"
    assert compute_choices(machine, frozenset({"bf16"}), 2) == (1, 2)
    assert compute_choices(machine, frozenset({"bf16"}), 1) == (1,)
    with pytest.raises(StatedError, match="q4_0"):
        compute_choices(machine, frozenset({"q4_0"}), 2)


def test_contention_is_found_by_activity() -> None:
    found = Contention.of(make_machine(slowdowns=(1.1, 1.3)), "disk_read", "host_compute")
    assert (found.read, found.compute) == (1.1, 1.3)
    assert Contention.of(make_machine(), "disk_read", "host_compute") == Contention()
    assert Contention.of(make_machine(slowdowns=(0.9, 1.3)), "disk_read", "host_compute").read == 1


def test_contention_by_hand() -> None:
    slow = Contention(read=1.25, compute=1.5)
    assert slow.stretched(10, 4) == pytest.approx((10 + 6 * 0.2, 6)), "6 s of computing cost the reader a fifth of 6 s"
    assert slow.stretched(2, 10) == pytest.approx((2.5, 10 + 2.5 / 3))
    assert slow.stretched(0, 10) == (0, 10)


@given(st.floats(1, 4), st.floats(1, 4), st.floats(0, 100), st.floats(0, 100))
def test_contention_bounds(read: float, compute: float, read_s: float, compute_s: float) -> None:
    slow = Contention.clamped(read, compute)
    both = slow.stretched(read_s, compute_s)
    assert both[0] >= read_s
    assert both[1] >= compute_s
    assert max(both) <= read_s + compute_s + 1e-9, "running both at once is never slower than one after the other"
    more = slow.stretched(read_s + 1, compute_s)
    assert more[0] >= both[0] - 1e-9
    assert more[1] >= both[1] - 1e-9


def test_layer_of_a_toy_by_hand() -> None:
    from lmoffload_solver.costs import LayerKind, MachineCosts

    machine = make_machine()
    costs = MachineCosts(machine, DiskCosts(machine.disks[0], 2), 1)
    kind = LayerKind.of(make_model(), 0)
    flops = 2 * 256 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    expected = 1e-4 + 7 * 1e-5 + 256 * kind.elementwise_bytes / 2e9 + flops / 1e10
    assert costs.layer_seconds(kind, "wide", np.array([256.0])) == pytest.approx([expected])
    assert costs.prefill_attention_seconds(kind.shape, [16]) == pytest.approx([4 * 4 * 16 * 128 / 1e9])
    assert costs.decode_attention_seconds(kind.shape, [256]) == pytest.approx([256 * 256 / 2e9])
    assert costs.lookup_seconds(make_model(), False) == 0
    assert costs.lookup_seconds(make_model(), True) == pytest.approx(1e-4 / 2 + 256 / 0.98e8)


def test_experts_of_a_toy_by_hand() -> None:
    """16 tokens with 2 of 8 experts: all but 8 · 0.75^16 of them are hit, each by 4.04 tokens: 5 are priced."""
    from lmoffload_solver.costs import LayerKind, MachineCosts, Product

    costs = MachineCosts(make_machine(), DiskCosts(make_machine().disks[0], 2), 1)
    product = Product("fp32", 64, 64, num_experts=8, per_token=2)
    hit = 8 * (1 - 0.75**16)
    calls, rows = product.calls_and_rows(np.array([16.0]))
    assert (calls, rows) == (pytest.approx(hit), 5)
    halves = Product("fp32", 32, 64, num_experts=8, per_token=2, parts=2).calls_and_rows(np.array([16.0]))
    assert halves == (pytest.approx(2 * hit), 5), "gate and up of an expert are stored apart"
    kind = LayerKind(make_model().layers[0], (product,), 0, 0)
    (one,) = costs.linear.seconds("wide", "fp32", 64, 64, np.array([5.0]))
    assert costs.linear_seconds(kind, "wide", np.array([16.0])) == [pytest.approx([hit * (1e-5 + one)])]
