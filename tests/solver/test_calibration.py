"""Calibration mends what is wrong with a profile, whatever it is, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmoffload_solver.calibration import calibrate
from lmoffload_solver.costs import PHASES
from lmoffload_solver.machine import Contention, Curve, MachineProfile
from lmoffload_solver.performed import Attentions, Others, Performed, Products, Reads
from lmoffload_solver.repriced import Repriced
from tests.solver.toys import MIB, make_machine

KINDS = {"reads": "read_weights", "products": "products", "attentions": "attention", "others": "rest"}


def truth() -> MachineProfile:
    """Two threads, a disk of 100 MB/s, reading and computing slow each other."""
    slow = Contention(first="disk_read", second="host_compute", first_slowdown=1.3, second_slowdown=1.2)
    return make_machine(disk_bytes_per_s=1e8, flops_per_s=1e9).model_copy(update={"contention": (slow,)})


def run_on(machine: MachineProfile, rows: int = 16) -> Performed:
    """A run whose every part takes as long as the machine predicts."""
    work = Performed(
        threads=2, io_threads=4, overlapped=True, row_bytes=128,
        reads=tuple(Reads(phase=phase, num_bytes=8 * MIB, num_requests=2, count=30, seconds=0) for phase in PHASES),
        products=tuple(
            Products(phase=phase, kernel="wide", format="bf16", n=256, k=1024, rows=m, count=count, seconds=0)
            for phase, m, count in (("prefill", 300, 40), ("decode", rows, 900))
        ),
        attentions=(
            Attentions(phase="prefill", format="fp32", length=64, amount=4e8, count=40, seconds=0),
            Attentions(phase="decode", format="fp32", length=128, amount=3e8, count=900, seconds=0),
        ),
        others=(
            Others(phase="prefill", layers=40, elementwise_bytes=4 * 10**9, steps=10, rows=160, lookups=0, seconds=0),
            Others(phase="decode", layers=900, elementwise_bytes=10**8, steps=200, rows=3000, lookups=0, seconds=0),
        ),
    )  # fmt: skip
    at = Repriced(machine, work)
    slow = {phase: at.slowdowns(phase) for phase in PHASES}
    return work.model_copy(
        update={
            "reads": tuple(r.model_copy(update={"seconds": at.read_s(r) * slow[r.phase][0]}) for r in work.reads),
            "products": tuple(
                p.model_copy(update={"seconds": (at.products_s(p) + at.calls_s(p)) * slow[p.phase][1]}) for p in work.products
            ),
            "attentions": tuple(a.model_copy(update={"seconds": at.attention_s(a) * slow[a.phase][1]}) for a in work.attentions),
            "others": tuple(
                o.model_copy(update={"seconds": (at.fixed_s(o) + at.elementwise_s(o)) * slow[o.phase][1]}) for o in work.others
            ),
        }
    )


def times(curve: Curve, factor: float) -> Curve:
    fit = None if curve.fit is None else curve.fit.model_copy(update={"rate_per_s": curve.fit.rate_per_s * factor})
    return curve.model_copy(update={"y": tuple(rate * factor for rate in curve.y), "fit": fit})


def disk(machine: MachineProfile, factor: float) -> MachineProfile:
    read = tuple(c.model_copy(update={"bytes_per_s": times(c.bytes_per_s, factor)}) for c in machine.disks[0].read)
    return machine.model_copy(update={"disks": (machine.disks[0].model_copy(update={"read": read}),)})


def linear(machine: MachineProfile, factor: float) -> MachineProfile:
    def changed(curve: Curve, is_it: bool) -> Curve:
        return times(curve, factor) if is_it else curve

    return machine.model_copy(
        update={
            "linear": tuple(
                c.model_copy(update={"flops_per_s": changed(c.flops_per_s, (c.kernel, c.format, c.threads) == ("wide", "bf16", 2))})
                for c in machine.linear
            )
        }
    )


def linear_at_many_rows(machine: MachineProfile, factor: float) -> MachineProfile:
    def bent(curve: Curve) -> Curve:
        return curve.model_copy(update={"y": tuple(y * (factor if x > 100 else 1.0) for x, y in zip(curve.x, curve.y, strict=True))})

    return machine.model_copy(
        update={"linear": tuple(c.model_copy(update={"flops_per_s": bent(c.flops_per_s)}) for c in machine.linear)}
    )


def attention(machine: MachineProfile, factor: float) -> MachineProfile:
    return machine.model_copy(
        update={"attention": tuple(c.model_copy(update={"rate": times(c.rate, factor)}) for c in machine.attention)}
    )


def fixed(machine: MachineProfile, factor: float) -> MachineProfile:
    at = machine.overheads
    scaled = {name: getattr(at, name) / factor for name in ("layer_s", "step_s", "row_s")}
    return machine.model_copy(update={"overheads": at.model_copy(update=scaled)})


def elementwise(machine: MachineProfile, factor: float) -> MachineProfile:
    at = machine.overheads
    return machine.model_copy(
        update={"overheads": at.model_copy(update={"elementwise_bytes_per_s": at.elementwise_bytes_per_s * factor})}
    )


FALSIFIED = (disk, linear, linear_at_many_rows, attention, fixed, elementwise)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("falsify", FALSIFIED)
def test_one_curve_that_is_off_twofold_is_mended(falsify: Callable[[MachineProfile, float], MachineProfile], factor: float) -> None:
    """Every rate of the mended profile is within 10 % of the true one where the run leaned on it; the wrong one is named."""
    true = truth()
    run, wrong = run_on(true), falsify(true, factor)
    found = calibrate(wrong, [run])
    for phase in PHASES:
        mended, right = Repriced(found.machine, run).alone_s(phase), Repriced(true, run).alone_s(phase)
        for part, seconds in right.items():
            assert mended[part] == pytest.approx(seconds, rel=0.1), (phase, part)
    worst = max(found.corrections, key=lambda one: max(one.times_off, 1 / one.times_off))
    name = falsify.__name__.partition("_")[0]
    assert worst.curve.startswith({"disk": "disk read", "fixed": "overheads", "elementwise": "overheads"}.get(name, name))
    assert all(one.after_s == pytest.approx(one.measured_s, rel=0.05) for one in found.corrections)


def test_curves_that_no_run_used_stay_as_they_are() -> None:
    true = truth()
    found = calibrate(linear(disk(true, 2.0), 0.5), [run_on(true)]).machine
    used = ("wide", "bf16", 2)
    unused = [c for c in found.linear if (c.kernel, c.format, c.threads) != used]
    assert unused == [c for c in true.linear if (c.kernel, c.format, c.threads) != used]
    assert [c for c in found.attention if c.threads == 1] == [c for c in true.attention if c.threads == 1]


def test_a_true_profile_is_not_changed() -> None:
    true = truth()
    found = calibrate(true, [run_on(true), run_on(true, rows=4)])
    assert [c.flops_per_s.y for c in found.machine.linear] == [pytest.approx(c.flops_per_s.y) for c in true.linear]
    assert all(one.times_off == pytest.approx(1.0) for one in found.corrections)
    assert found.machine.overheads.layer_s == pytest.approx(true.overheads.layer_s)


def test_little_time_says_nothing() -> None:
    work = Products(phase="decode", kernel="wide", format="bf16", n=64, k=64, rows=4, count=1, seconds=0.009)
    run = Performed(threads=2, io_threads=1, overlapped=False, row_bytes=1, products=(work,))
    found = calibrate(truth(), [run])
    assert (found.machine, found.corrections) == (truth(), ())
