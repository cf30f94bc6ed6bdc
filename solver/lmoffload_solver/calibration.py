"""Calibration: the curves of a profile scaled until it predicts what runs measured.

Each curve that a run leaned on gets a factor at the place (rows, tokens, bytes of a request) where it did; between two such places the
factor is interpolated log-log, beyond them it is flat. Curves slow each other by contention, so that a few rounds are made, each from the
curves of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from lmoffload_solver.costs import PHASES, Phase, attention_curve, disk_of
from lmoffload_solver.machine import Curve, MachineProfile
from lmoffload_solver.performed import Performed
from lmoffload_solver.repriced import Repriced
from lmoffload_solver.value import Value

ROUNDS = 6
LEAST_S = 0.01
"""Less time than this says nothing about a curve."""
SHORT_S = 5e-5
"""A product or attention predicted to take less is mostly its call, a fixed cost."""
NEAR_OCTAVES = 2
"""Places nearer to each other are one: profiles have about a point in two octaves."""
MOST = 10.0
"""No curve is made more than this many times quicker or slower in a round."""
PULL = 0.02
"""Weight that draws what fixed and elementwise costs cannot be told apart by towards what they are."""


class CurveKey(NamedTuple):
    """What tells a curve from the others of a profile."""

    kind: str
    """"disk read", "linear", "attention" or "overheads"."""
    names: tuple[str, ...]
    threads: int

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else ""
        return f"{self.kind}, {' on '.join(self.names)}{threads}"


class Correction(Value):
    """What runs said of one curve at one place."""

    curve: str
    at: float
    """Rows of the product, tokens of the sequence, or bytes of a request; 0 for costs without a curve."""
    measured_s: float
    before_s: float
    """As the profile predicted it."""
    after_s: float
    """As it does now."""

    @property
    def times_off(self) -> float:
        """Measured / predicted before."""
        return self.measured_s / self.before_s


class Calibrated(Value):
    """A profile that predicts what was measured, and what has changed."""

    machine: MachineProfile
    corrections: tuple[Correction, ...]


@dataclass
class _Seen:
    """Time spent on one curve at one place: as predicted, as measured, and log(place) weighted with the first."""

    predicted_s: float = 0.0
    measured_s: float = 0.0
    weighted_log: float = 0.0

    def add(self, more: _Seen) -> None:
        self.predicted_s += more.predicted_s
        self.measured_s += more.measured_s
        self.weighted_log += more.weighted_log

    @property
    def at(self) -> float:
        return math.exp(self.weighted_log / self.predicted_s)

    @property
    def factor(self) -> float:
        """Of the rate."""
        return min(MOST, max(1 / MOST, self.predicted_s / self.measured_s))


@dataclass
class _Reading:
    """What runs say of a profile: by curve and octave of the place; and of its fixed and elementwise costs, by run and phase."""

    curves: dict[CurveKey, dict[int, _Seen]] = field(default_factory=dict)
    others: list[tuple[float, float, float]] = field(default_factory=list)
    """(fixed, elementwise, measured) seconds."""

    def see(self, key: CurveKey, at: float, predicted_s: float, measured_s: float) -> None:
        seen = self.curves.setdefault(key, {}).setdefault(round(math.log2(at)), _Seen())
        seen.add(_Seen(predicted_s, measured_s, predicted_s * math.log(at)))

    def telling(self) -> Iterator[tuple[CurveKey, dict[int, _Seen]]]:
        """The curves with enough time on them, and their places by first octave, ascending."""
        for key, places in self.curves.items():
            merged: dict[int, _Seen] = {}
            for octave in sorted(places):
                near = next(reversed(merged), None)
                if near is None or octave - near >= NEAR_OCTAVES:
                    near = octave
                merged.setdefault(near, _Seen()).add(places[octave])
            kept = {octave: seen for octave, seen in merged.items() if seen.measured_s >= LEAST_S}
            if kept:
                yield key, kept


def calibrate(machine: MachineProfile, runs: Sequence[Performed]) -> Calibrated:
    """Fold what runs measured into a profile.

    Raises:
        StatedError: the profile lacks a disk or a curve that the runs used.
    """
    now = machine
    for _ in range(ROUNDS):
        now = _scaled(now, _read(now, runs))
    return Calibrated(machine=now, corrections=tuple(_corrections(_read(machine, runs), _read(now, runs))))


def _read(machine: MachineProfile, runs: Iterable[Performed]) -> _Reading:
    reading = _Reading()
    for run in runs:
        repriced = Repriced(machine, run)
        for phase in PHASES:
            _read_phase(reading, repriced, phase)
    return reading


def _read_phase(reading: _Reading, repriced: Repriced, phase: Phase) -> None:
    """Measured seconds are taken down to those alone, as the curves are; what calls cost beyond their prediction is a fixed cost."""
    machine, run = repriced.machine, repriced.performed
    calls_s = 0.0
    read_slow, compute_slow = repriced.slowdowns(phase)
    disk = CurveKey("disk read", (disk_of(machine, run.file_system).file_system,), 0)
    for reads in run.reads:
        if reads.phase == phase:
            reading.see(disk, reads.num_bytes / reads.num_requests, repriced.read_s(reads), reads.seconds / read_slow)
    for products in run.products:
        if products.phase == phase:
            names = repriced.costs.linear.kernel_for(products.kernel, products.format), products.format
            predicted_s, alone_s = repriced.products_s(products), products.seconds / compute_slow - repriced.calls_s(products)
            if predicted_s < SHORT_S * products.count:
                calls_s += alone_s - predicted_s
            else:
                rows = round(products.rows)
                reading.see(CurveKey("linear", names, run.threads), rows, predicted_s, max(alone_s, predicted_s / MOST))
    for attentions in run.attentions:
        if attentions.phase == phase:
            threads = attention_curve(machine, phase, attentions.format, run.threads).threads
            predicted_s, alone_s = repriced.attention_s(attentions), attentions.seconds / compute_slow
            if predicted_s < SHORT_S * attentions.count:
                calls_s += alone_s - predicted_s
            else:
                reading.see(CurveKey("attention", (phase, attentions.format), threads), attentions.length, predicted_s, alone_s)
    for others in run.others:
        measured_s = others.seconds / compute_slow - repriced.lookups_s(others) + calls_s
        if others.phase == phase and measured_s >= LEAST_S:
            reading.others.append((repriced.fixed_s(others), repriced.elementwise_s(others), measured_s))


def _scaled(machine: MachineProfile, reading: _Reading) -> MachineProfile:
    """The profile with every curve that was told of scaled."""
    found = {key: list(places.values()) for key, places in reading.telling()}
    disks = tuple(
        disk.model_copy(
            update={"read": tuple(c.model_copy(update={"bytes_per_s": _curve(c.bytes_per_s, found[key])}) for c in disk.read)}
        )
        if (key := CurveKey("disk read", (disk.file_system,), 0)) in found
        else disk
        for disk in machine.disks
    )
    linear = tuple(
        curve.model_copy(update={"flops_per_s": _curve(curve.flops_per_s, found[key])})
        if (key := CurveKey("linear", (curve.kernel, curve.format), curve.threads)) in found
        else curve
        for curve in machine.linear
    )
    attention = tuple(
        curve.model_copy(update={"rate": _curve(curve.rate, found[key])})
        if (key := CurveKey("attention", (curve.phase, curve.format), curve.threads)) in found
        else curve
        for curve in machine.attention
    )
    fixed, elementwise = _cost_factors(reading.others)
    at = machine.overheads
    overheads = at.model_copy(
        update={
            "layer_s": at.layer_s * fixed,
            "python_layer_s": at.python_layer_s * fixed,
            "device_layer_s": at.device_layer_s * fixed,
            "step_s": at.step_s * fixed,
            "row_s": at.row_s * fixed,
            "elementwise_bytes_per_s": at.elementwise_bytes_per_s / elementwise,
        }
    )
    return machine.model_copy(update={"disks": disks, "linear": linear, "attention": attention, "overheads": overheads})


def _curve(curve: Curve, places: Sequence[_Seen]) -> Curve:
    """A curve scaled by the factors at some places; its law by that where most time was spent."""
    logs = np.interp(np.log(curve.x), [math.log(seen.at) for seen in places], [math.log(seen.factor) for seen in places])
    most = max(places, key=lambda seen: seen.measured_s).factor
    fit = curve.fit
    if fit is not None:
        fit = fit.model_copy(update={"latency_s": fit.latency_s / most, "rate_per_s": fit.rate_per_s * most})
    return curve.model_copy(update={"y": tuple((np.asarray(curve.y) * np.exp(logs)).tolist()), "fit": fit})


def _cost_factors(others: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Factors (fixed, elementwise) of least relative error: fixed · a + elementwise · b = measured for each run and phase."""
    if not others:
        return 1.0, 1.0
    rows = [[fixed / measured, elementwise / measured] for fixed, elementwise, measured in others]
    solved = lsq_linear([*rows, [PULL, 0.0], [0.0, PULL]], [*(1.0 for _ in rows), PULL, PULL], bounds=(1 / MOST, MOST))
    return float(solved.x[0]), float(solved.x[1])


def _corrections(before: _Reading, after: _Reading) -> Iterator[Correction]:
    then = dict(after.telling())
    for key, places in before.telling():
        for octave, seen in places.items():
            now = then.get(key, {}).get(octave, seen)
            yield Correction(
                curve=str(key), at=seen.at, measured_s=seen.measured_s, before_s=seen.predicted_s,
                after_s=now.predicted_s * seen.measured_s / now.measured_s,
            )  # fmt: skip
    for (fixed, elementwise, measured), (fixed_now, elementwise_now, measured_now) in zip(before.others, after.others, strict=False):
        yield Correction(
            curve="overheads", at=0.0, measured_s=measured, before_s=fixed + elementwise,
            after_s=(fixed_now + elementwise_now) * measured / measured_now,
        )  # fmt: skip
