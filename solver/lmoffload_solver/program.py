"""The linear program: for fixed discrete choices, the least job time over the resident fractions of the classes of weights.

Symbols (units): w[c, t] fraction of class c at home in tier t; B_c bytes of class c; S bytes of one ring buffer; T_e seconds of sampled
step e, which stands for weight_e steps; r_c seconds to read all of class c; D = Σ_c w[c, disk]·r_c seconds to read what streams in a step;
C_e seconds to compute step e; d, k >= 1 slowdown of reading and of computing while both run. One function per family of rows; every row is
named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lmoffload_solver.closed_form import Head, Layers
from lmoffload_solver.costs import Contention
from lmoffload_solver.modelling import load_pulp
from lmoffload_solver.value import Tier


@dataclass(frozen=True)
class WeightClass:
    """Matrices that are placed by one fraction."""

    name: str
    num_bytes: int
    unit_bytes: float
    """Mean bytes of the class in what streams at once, a layer or a matrix; 0 outside the layers."""
    read_s: float
    """Seconds to read all of it."""
    count: int = 1
    """Matrices of which it is made, all alike."""
    streams: bool = True
    """False for an embedding table that is only looked up."""
    looked_up: bool = False
    """An embedding table: on disk its rows are read one by one."""


@dataclass(frozen=True)
class ProgramStep:
    """A sampled step."""

    name: str
    weight: float
    compute_s: float
    lookup_s: float
    """Added where the embedding table is on disk."""
    early: bool
    """Units in the ring buffers may have been read before the step begins, while a longer step computed."""
    layer_s: float
    """Computing of the quickest layer."""
    head_s: float
    """Computing of the output head."""
    load_s: float = 0.0
    """Loading of keys and values on the disk, at least."""
    store_s: float = 0.0
    """Storing of them, at least."""


@dataclass(frozen=True)
class Choices:
    """What is fixed: everything but the fractions."""

    tiers: tuple[Tier, ...]
    """The chain from the compute tier outward."""
    classes: tuple[WeightClass, ...]
    steps: tuple[ProgramStep, ...]
    stream: Literal["layer", "matrix"]
    """What streams at once."""
    layers: Layers
    head: Head
    prefetch_depth: int
    contention: Contention
    memory_bytes: int
    """For homes and ring buffers of matrices in the compute tier, by its capacity."""
    weights_bytes: int | None
    """The same by the user's limit on weights memory."""


@dataclass(frozen=True)
class Solution:
    """The optimum and its duals."""

    total_s: float
    fractions: dict[str, dict[Tier, float]]
    buffer_bytes: float
    duals: dict[str, float]
    """Seconds per unit of each row's right-hand side."""
    seconds_per_byte: float
    """Marginal seconds saved by one more byte of the compute tier (or of the user's limit, where that binds)."""
    waiting_s: float
    """Seconds of the job that are reading and nothing else: marginal seconds per relative slowing of the disk."""
    read_s: float
    """D: seconds of reading in a step."""


class Program:
    """The program of one set of choices, as a PuLP model.

    Args:
        whole: matrices are placed whole: an integer program, whose optimum is nearer to what can be placed; it has no duals.
    """

    def __init__(self, choices: Choices, *, whole: bool = False) -> None:
        self.pulp = pulp = load_pulp()
        self.choices = choices
        self.model = pulp.LpProblem("placement", pulp.LpMinimize)
        self.rows: dict[str, Any] = {}
        self.near, self.far = choices.tiers[0], choices.tiers[1]
        new = self.model.add_variable
        self.fraction = {c.name: {tier: new(f"w.{c.name}.{tier}", 0, 1) for tier in choices.tiers} for c in choices.classes}
        self.buffer = new("S", 0)
        self.seconds = [new(f"T.{step.name}", 0) for step in choices.steps]
        self.model += pulp.lpSum(step.weight * seconds for step, seconds in zip(choices.steps, self.seconds, strict=True))
        self.placed()
        self.buffer_size()
        self.capacity()
        self.reading()
        self.computing()
        self.serial()
        if whole:
            self.whole()

    def placed(self) -> None:
        """placed.c: Σ_t w[c, t] = 1 for each class c."""
        for name, fractions in self.fraction.items():
            self._add(f"placed.{name}", self.pulp.lpSum(fractions.values()) == 1)

    def buffer_size(self) -> None:
        """buffer: Σ_c w[c, disk]·b_c <= S where layers stream, b_c the mean of class c over the layers: the largest layer streams no less.
        buffer.c: w[c, disk]·b_c <= S where matrices stream one by one, b_c the mean of the class over its matrices."""
        streamed = {c.name: c.unit_bytes * self.fraction[c.name][self.far] for c in self.choices.classes if c.streams and c.unit_bytes}
        if self.choices.stream == "layer":
            self._add("buffer", self.pulp.lpSum(streamed.values()) <= self.buffer)
            return
        for name, one in streamed.items():
            self._add(f"buffer.{name}", one <= self.buffer)

    def capacity(self) -> None:
        """capacity.tier and capacity.weights: Σ_c w[c, tier]·B_c + (prefetch depth + 1)·S <= M, with M what the largest phase leaves of the
        tier, or the user's limit on weights. Nothing streams where all fits, so S may be 0."""
        homes = self.pulp.lpSum(c.num_bytes * self.fraction[c.name][self.near] for c in self.choices.classes)
        used = homes + (self.choices.prefetch_depth + 1) * self.buffer
        self._add(f"capacity.{self.near}", used <= self.choices.memory_bytes)
        if self.choices.weights_bytes is not None:
            self._add("capacity.weights", used <= self.choices.weights_bytes)

    def reading(self) -> None:
        """read.e: T_e >= D + loads − early + C_e·k·(1 − 1/d): the reader works through both and is slowed while computing lasts.
        write.e: T_e >= stores. reader: Σ_e weight_e·T_e >= Σ_e weight_e·(D + loads): whatever is read early, it is read.
        early: what the ring buffers may already hold, the reading of (prefetch depth + 1) of the largest units, where a longer step came
        before."""
        slow = self._contention()
        steps = self.choices.steps
        weights = sum(step.weight for step in steps)
        total = self.pulp.lpSum(step.weight * seconds for step, seconds in zip(steps, self.seconds, strict=True))
        self._add("reader", total >= weights * self._read_s() + sum(step.weight * step.load_s for step in steps))
        for step, seconds in zip(self.choices.steps, self.seconds, strict=True):
            rest = slow.compute * (1 - 1 / slow.read)
            row = seconds >= self._read_s() + step.load_s - self._early_s(step) + rest * self._compute_s(step)
            self._add(f"read.{step.name}", row)
            if step.store_s:
                self._add(f"write.{step.name}", seconds >= step.store_s)

    def computing(self) -> None:
        """compute.e: T_e >= C_e + (D + loads − early)·d·(1 − 1/k), and busy.e: T_e >= C_e."""
        slow = self._contention()
        rest = slow.read * (1 - 1 / slow.compute)
        for step, seconds in zip(self.choices.steps, self.seconds, strict=True):
            self._add(f"busy.{step.name}", seconds >= self._compute_s(step))
            if rest:
                row = seconds >= self._compute_s(step) + rest * (self._read_s() + step.load_s - self._early_s(step))
                self._add(f"compute.{step.name}", row)

    def serial(self) -> None:
        """serial.e, with a single ring buffer: T_e >= D − early + (layers that stream)·(computing of the quickest layer) + w[head, disk]·h:
        what streams of a layer is not read before the layer that streamed before it is computed; at least Σ_c w[c, disk]·B_c / (bytes of a
        layer) layers stream; h is computing the head. head.e: T_e >= D − early + w[head, host]·h − (reading the ring's buffers), and with a
        single one the layers that stream: a head at home is computed in one go, while no more is read than the ring holds. pieces.e: T_e >=
        C_e − h + w[head, disk]·(reading the head) − (reading the ring's buffers), which is left to read when the layers are computed."""
        depth, head, layers = self.choices.prefetch_depth, self.fraction["head"], self.choices.layers
        streamed = [c.num_bytes * self.fraction[c.name][self.far] for c in self.choices.classes if c.streams and c.unit_bytes]
        ring_s = (depth + 1) * layers.most_s_per_byte * self.buffer
        for step, seconds in zip(self.choices.steps, self.seconds, strict=True):
            read_s = self._read_s() - self._early_s(step)
            waits = 0 if depth else step.layer_s / layers.largest_bytes * self.pulp.lpSum(streamed)
            self._add(f"head.{step.name}", seconds >= read_s + waits + step.head_s * head[self.near] - ring_s)
            pieces_s = self.choices.head.read_s * head[self.far] - (depth + 1) * self.choices.head.s_per_byte * self.buffer
            self._add(f"pieces.{step.name}", seconds >= step.compute_s - step.head_s + pieces_s)
            if not depth:
                self._add(f"serial.{step.name}", seconds >= read_s + waits + step.head_s * head[self.far])

    def whole(self) -> None:
        """whole.c: w[c, disk] = (matrices of class c that stream) / (matrices of c); some.c and largest.c: S holds the largest of them."""
        for c in self.choices.classes:
            number = self.model.add_variable(f"n.{c.name}", 0, c.count, self.pulp.LpInteger)
            self._add(f"whole.{c.name}", c.count * self.fraction[c.name][self.far] == number)
            if c.streams and c.unit_bytes:
                streams = self.model.add_variable(f"y.{c.name}", 0, 1, self.pulp.LpInteger)
                self._add(f"some.{c.name}", number <= c.count * streams)
                self._add(f"largest.{c.name}", c.num_bytes / c.count * streams <= self.buffer)

    def bound_s(self) -> float | None:
        """Seconds that nothing goes below; None where the rows contradict each other."""
        with _silent_stdout():
            self.model.solve(self.pulp.HiGHS(msg=False))
        return float(self.pulp.value(self.model.objective)) if self.pulp.LpStatus[self.model.status] == "Optimal" else None

    def solve(self) -> Solution | None:
        """The optimum; None where the rows contradict each other."""
        with _silent_stdout():
            self.model.solve(self.pulp.HiGHS(msg=False))
        if self.pulp.LpStatus[self.model.status] != "Optimal":
            return None
        duals = {name: float(row.pi) for name, row in self.rows.items()}
        bound_to_memory = duals.get(f"capacity.{self.near}", 0.0) + duals.get("capacity.weights", 0.0)
        fractions = {c: {tier: float(v.value()) for tier, v in by_tier.items()} for c, by_tier in self.fraction.items()}
        read_s = sum(c.read_s * fractions[c.name][self.far] for c in self.choices.classes if c.streams)
        return Solution(
            float(self.pulp.value(self.model.objective)),
            fractions,
            float(self.buffer.value()),
            duals,
            -bound_to_memory,
            self._waiting_s(duals, read_s),
            read_s,
        )

    def _waiting_s(self, duals: dict[str, float], read_s: float) -> float:
        slow = self._contention()
        rest = slow.read * (1 - 1 / slow.compute)
        total = duals["reader"] * sum(step.weight * (read_s + step.load_s) for step in self.choices.steps)
        for step in self.choices.steps:
            both = duals[f"read.{step.name}"] + rest * duals.get(f"compute.{step.name}", 0.0)
            total += both * (read_s + step.load_s - self._early_s(step))
            one_by_one = duals.get(f"serial.{step.name}", 0.0) + duals.get(f"head.{step.name}", 0.0)
            total += one_by_one * (read_s - self._early_s(step))
        return total

    def _add(self, name: str, row: Any) -> None:
        self.rows[name] = row
        self.model.addConstraint(row, name)

    def _contention(self) -> Contention:
        """Nothing overlaps for long without read-ahead; loads of keys and values are ahead always."""
        ahead = self.choices.prefetch_depth or any(step.load_s for step in self.choices.steps)
        return self.choices.contention if ahead else Contention()

    def _read_s(self) -> Any:
        return self.pulp.lpSum(c.read_s * self.fraction[c.name][self.far] for c in self.choices.classes if c.streams)

    def _early_s(self, step: ProgramStep) -> float:
        largest_s = max(self.choices.layers.unit_s, self.choices.head.piece_s)
        return (self.choices.prefetch_depth + 1) * largest_s if step.early else 0.0

    def _compute_s(self, step: ProgramStep) -> Any:
        lookups = [self.fraction[c.name][self.far] * step.lookup_s for c in self.choices.classes if c.looked_up]
        return self.pulp.lpSum(lookups) + step.compute_s


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints its version to file descriptor 1 when it is first made, whatever its options say; stdout is for results alone."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
