"""What a profile predicts for the work that a run performed, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lmoffload_solver.costs import Contention, DiskCosts, MachineCosts, Phase, attention_curve, disk_of, rate_at
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.performed import Attentions, Others, Part, Performed, Products, Reads
from lmoffload_solver.schedule import READ_REQUEST_BYTES


@dataclass(frozen=True)
class Repriced:
    """A machine's predictions for a run's work. Seconds are of each part alone; `slowdowns` is what doing two at once makes of them."""

    machine: MachineProfile
    performed: Performed

    @cached_property
    def costs(self) -> MachineCosts:
        """At the run's numbers of threads."""
        disk = DiskCosts(disk_of(self.machine, self.performed.file_system), self.performed.io_threads)
        return MachineCosts(self.machine, disk, self.performed.threads)

    def read_s(self, reads: Reads) -> float:
        """Seconds of all these reads."""
        return reads.count * self.costs.disk.read_seconds(reads.num_bytes, reads.num_requests)

    def calls_s(self, products: Products) -> float:
        """Seconds of handing these products to the pool."""
        return products.count * self.machine.overheads.call_s(self.performed.threads)

    def products_s(self, products: Products) -> float:
        """Seconds of these products, their hand-over left out."""
        rows = round(products.rows)
        one = self.costs.linear.seconds(products.kernel, products.format, products.n, products.k, np.array([float(rows)]))
        return products.count * float(one[0])

    def attention_s(self, attentions: Attentions) -> float:
        """Seconds of this attention."""
        curve = attention_curve(self.machine, attentions.phase, attentions.format, self.performed.threads)
        return attentions.amount / float(rate_at(curve.rate, attentions.length))

    def fixed_s(self, others: Others) -> float:
        """Fixed costs of layers, steps and sequences."""
        at = self.machine.overheads
        return at.layer_s * others.layers + at.step_s * others.steps + at.row_s * others.rows

    def elementwise_s(self, others: Others) -> float:
        """Seconds of norms, rotary embedding, activations and residuals."""
        layers = max(1, others.layers)
        return layers * float(self.machine.overheads.elementwise_s(others.elementwise_bytes / layers))

    def lookups_s(self, others: Others) -> float:
        """Seconds of random reads of the embedding table."""
        if not others.lookups:
            return 0.0
        disk = self.costs.disk
        return others.lookups * (
            self.machine.overheads.random_read_s / disk.io_threads + self.performed.row_bytes / disk.best_rate(READ_REQUEST_BYTES)
        )

    def alone_s(self, phase: Phase) -> dict[Part, float]:
        """Seconds of each part of a phase, alone."""
        work = self.performed
        parts: dict[Part, float] = {
            "read_weights": sum(self.read_s(r) for r in work.reads if r.phase == phase),
            "products": sum(self.calls_s(p) + self.products_s(p) for p in work.products if p.phase == phase),
            "attention": sum(self.attention_s(a) for a in work.attentions if a.phase == phase),
            "rest": sum(self.fixed_s(o) + self.elementwise_s(o) + self.lookups_s(o) for o in work.others if o.phase == phase),
        }
        parts["compute"] = parts["products"] + parts["attention"] + parts["rest"]
        return parts

    def slowdowns(self, phase: Phase) -> tuple[float, float]:
        """Time together / time alone of reading and of computing in a phase, where as much as possible of both runs at once."""
        alone = self.alone_s(phase)
        read_s, compute_s = alone["read_weights"], alone["compute"]
        if not (self.performed.overlapped and read_s and compute_s):
            return 1.0, 1.0
        slow = Contention.of(self.machine, "disk_read", "host_compute")
        read_slow, compute_slow = slow.stretched(read_s, compute_s)
        return read_slow / read_s, compute_slow / compute_s

    def predicted_s(self, phase: Phase) -> dict[Part, float]:
        """Seconds of each part of a phase, as slow as its neighbours make it."""
        read, compute = self.slowdowns(phase)
        return {part: seconds * (read if part == "read_weights" else compute) for part, seconds in self.alone_s(phase).items()}


def measured_s(performed: Performed, phase: Phase) -> dict[Part, float]:
    """Seconds that each part of a phase took."""
    products = _sum(performed.products, phase)
    attention, rest = _sum(performed.attentions, phase), _sum(performed.others, phase)
    return {
        "read_weights": _sum(performed.reads, phase),
        "compute": products + attention + rest,
        "products": products,
        "attention": attention,
        "rest": rest,
    }


def _sum(done: Sequence[Reads | Products | Attentions | Others], phase: Phase) -> float:
    return sum(one.seconds for one in done if one.phase == phase)
