"""FlexGen's own linear program, as published: the shares with the most tokens per second for one batch.

Source and symbols: see flexgen_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lmoffload_solver.modelling import load_pulp
from lmoffload_solver.policies.flexgen_constants import GIB
from lmoffload_solver.policies.flexgen_memory import peak_bytes, usable_bytes
from lmoffload_solver.policies.flexgen_model import Case, Shares, decode_terms_s, prefill_terms_s
from lmoffload_solver.program import _silent_stdout
from lmoffload_solver.value import Tier

K = TypeVar("K")

PRICE: Mapping[Tier, float] = {"device": 4.0, "host": 2.0, "disk": 1.0}
"""What a lacking byte counts, in bytes of disk."""


class FlexgenProgram:
    """min T / bls over the shares of one case, or, `elastic`, the least bytes by which memories are exceeded; a PuLP model.

    Memories are counted in shares of themselves, seconds in those of computing alone: the solver's absolute tolerances become relative.
    """

    def __init__(self, case: Case, *, elastic: bool = False) -> None:
        self.pulp = pulp = load_pulp()
        self.case = case
        self.model = pulp.LpProblem("flexgen", pulp.LpMinimize)
        new = self.model.add_variable
        self.shares = Shares(*(new(name, 0, 1) for name in Shares._fields))
        self.over = {tier: new(f"over.{tier}", 0) for tier in usable_bytes(case.constants)} if elastic else {}
        self.placed()
        self.capacity()
        if elastic:
            self.least_excess()
        else:
            self.least_time()

    def least_excess(self) -> None:
        """min Σ_tier price·bytes beyond its capacity, so that what is named is the memory that is had most easily."""
        units = _units(self.case)
        self.model += self.pulp.lpSum(PRICE[tier] * units[tier] / GIB * over for tier, over in self.over.items())

    def least_time(self) -> None:
        """min Tpre + (n − 1)·Tgen, which is T / bls but for a factor."""
        case, new = self.case, self.model.add_variable
        self.prefill, self.decode = new("Tpre", 0), new("Tgen", 0)
        host = Shares(wc=1, cc=1, hc=1)
        prefill_unit_s, decode_unit_s = prefill_terms_s(host, case)["compute"], decode_terms_s(host, case)["compute"]
        decode_part = (case.generated - 1) * decode_unit_s / prefill_unit_s
        self.model += self.prefill * (1 / (1 + decode_part)) + self.decode * (decode_part / (1 + decode_part))
        self.layer_time("Tpre", self.prefill, prefill_unit_s, self._affine(lambda shares: prefill_terms_s(shares, case)))
        self.layer_time("Tgen", self.decode, decode_unit_s, self._affine(lambda shares: decode_terms_s(shares, case)))

    def placed(self) -> None:
        """placed.x: xg + xc + xn = 1 for x = w, c, h; and hn = 0, since FlexGen's runtime keeps no hidden states on disk."""
        for name, i in (("w", 0), ("c", 3), ("h", 6)):
            self.model.addConstraint(self.pulp.lpSum(self.shares[i : i + 3]) == 1, f"placed.{name}")
        self.model.addConstraint(self.shares.hn == 0, "placed.hn")

    def capacity(self) -> None:
        """capacity.tier.phase: peak bytes / usable bytes <= 1, where usable is capacity_share of the memory."""
        usable, units = usable_bytes(self.case.constants), _units(self.case)
        for (tier, phase), (constant, slopes) in self._affine(lambda shares: peak_bytes(shares, self.case)).items():
            used = self._sum(slopes, 1 / units[tier]) + constant / units[tier]
            self.model.addConstraint(used <= usable[tier] / units[tier] + self.over.get(tier, 0), f"capacity.{tier}.{phase}")

    def layer_time(self, name: str, variable: Any, unit_s: float, terms: Mapping[str, tuple[float, Shares]]) -> None:
        """Tpre.term and Tgen.term: T >= term for each term of the maximum, in units of `unit_s`."""
        for term, (constant, slopes) in terms.items():
            self.model.addConstraint(variable >= self._sum(slopes, 1 / unit_s) + constant / unit_s, f"{name}.{term}")

    def solve(self) -> bool:
        """False where the rows contradict each other."""
        with _silent_stdout():
            self.model.solve(self.pulp.HiGHS(msg=False))
        status = self.pulp.LpStatus[self.model.status]
        assert status in ("Optimal", "Infeasible"), status
        return bool(status == "Optimal")

    def solution(self) -> Shares:
        """The optimal shares, rid of the solver's tolerance: none below 0, each triple adding up to 1."""
        found = [max(0.0, float(self.pulp.value(variable))) for variable in self.shares]
        return Shares(*(value / sum(found[i - i % 3 : i - i % 3 + 3]) for i, value in enumerate(found)))

    def _affine(self, terms: Callable[[Shares], Mapping[K, float]]) -> dict[K, tuple[float, Shares]]:
        """Constant and slopes of each term, read off at the origin and at the nine unit points."""
        origin = terms(Shares())
        units = [terms(Shares(**{name: 1.0})) for name in Shares._fields]
        return {name: (constant, Shares(*(unit[name] - constant for unit in units))) for name, constant in origin.items()}

    def _sum(self, slopes: Shares, factor: float) -> Any:
        return self.pulp.lpSum(variable * (slope * factor) for variable, slope in zip(self.shares, slopes, strict=True) if slope)


def best_shares(case: Case) -> Shares | None:
    """The shares with the most tokens per second for the batch of the case, by FlexGen's program; None where none fits."""
    program = FlexgenProgram(case)
    return program.solution() if program.solve() else None


def shortfall_bytes(case: Case) -> dict[Tier, float]:
    """Bytes that each memory lacks, by its capacity rule, for the shares that lack least by PRICE; memories that suffice are left out."""
    program = FlexgenProgram(case, elastic=True)
    solved = program.solve()
    assert solved, "memories of any size hold any policy"
    lacking = {tier: _units(case)[tier] * float(over.value()) for tier, over in program.over.items()}
    return {tier: lack for tier, lack in lacking.items() if lack >= 1}


def _units(case: Case) -> dict[Tier, float]:
    """Bytes in which the rows of a memory are written."""
    return {tier: usable or GIB for tier, usable in usable_bytes(case.constants).items()}
