"""FlexGen's own policy search, as published: its walk over batches, with a linear program for each.

Source and symbols: see flexgen_model. The walk proves nothing: of each micro-batch it stops where one more of them first lowers throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmoffload_solver.errors import InfeasibleError
from lmoffload_solver.policies.flexgen_constants import GIB, FlexgenConstants
from lmoffload_solver.policies.flexgen_model import Case, Dimensions, PolicyRow, Prediction, Shares, predict_shares
from lmoffload_solver.policies.flexgen_program import best_shares, shortfall_bytes

REAL_FALL = 1e-6
"""A smaller relative fall of throughput is the solver's tolerance, not the batch's doing."""


@dataclass(frozen=True)
class Found:
    """What FlexGen's search ends with."""

    row: PolicyRow
    prediction: Prediction
    programs_solved: int


class FlexgenSearch:
    """FlexGen's walk: micro-batches of 1, 2, 3, 4, 8, 16, ... rows while one fits, of each 1, 2, 3, ... while throughput does not fall."""

    def __init__(self, dims: Dimensions, prompt: int, generated: int, constants: FlexgenConstants, *, weights_4bit: bool = False) -> None:
        self.job = (dims, prompt, generated)
        self.constants = constants
        self.weights_4bit = weights_4bit
        self.solved: dict[tuple[int, int], Shares | None] = {}

    def run(self) -> Found:
        """The best policy met.

        Raises:
            InfeasibleError: not even one row fits; names the memory and what it lacks.
        """
        best: tuple[Prediction, int, int] | None = None
        for micro_batch in _micro_batches():
            most = self.most_micro_batches(micro_batch)
            if not most:
                break
            for number, prediction in self.rising(micro_batch, most):
                if best is None or prediction.tokens_per_s > best[0].tokens_per_s:
                    best = (prediction, micro_batch, number)
        if best is None:
            raise InfeasibleError(self._shortage())
        prediction, micro_batch, number = best
        return Found(self._row(micro_batch, number), prediction, len(self.solved))

    def most_micro_batches(self, micro_batch: int) -> int:
        """The largest number of micro-batches that fits, by doubling and bisection; 0 where none does."""
        beyond = 1
        while self.shares(micro_batch, beyond) is not None:
            beyond *= 2
        fitting = beyond // 2
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            if self.shares(micro_batch, middle) is None:
                beyond = middle
            else:
                fitting = middle
        return fitting

    def rising(self, micro_batch: int, most: int) -> Iterator[tuple[int, Prediction]]:
        """1, 2, ... micro-batches with their predictions, up to the last before throughput falls."""
        previous = 0.0
        for number in range(1, most + 1):
            shares = self.shares(micro_batch, number)
            assert shares is not None, "fewer micro-batches need less memory"
            prediction = predict_shares(shares, self._case(micro_batch, number))
            if prediction.tokens_per_s < previous * (1 - REAL_FALL):
                return
            previous = prediction.tokens_per_s
            yield number, prediction

    def shares(self, micro_batch: int, number: int) -> Shares | None:
        """The program's shares for a batch, solved once."""
        if (micro_batch, number) not in self.solved:
            self.solved[micro_batch, number] = best_shares(self._case(micro_batch, number))
        return self.solved[micro_batch, number]

    def _case(self, micro_batch: int, number: int) -> Case:
        return Case(*self.job, micro_batch, number, self.constants, self.weights_4bit)

    def _row(self, micro_batch: int, number: int) -> PolicyRow:
        shares = self.shares(micro_batch, number)
        assert shares is not None
        wg, wc, _, cg, cc, _, hg, hc, _ = (100 * share for share in shares)
        percent = (wg, wc, cg, cc, hg, hc)
        return PolicyRow(percent=percent, micro_batch=micro_batch, num_micro_batches=number, weights_4bit=self.weights_4bit)

    def _shortage(self) -> str:
        lacking = shortfall_bytes(self._case(1, 1))
        told = " and ".join(f"{lack / GIB:.2f} GiB of {tier}" + " memory" * (tier != "disk") for tier, lack in lacking.items())
        share = f"{100 * self.constants.capacity_share:.0f} %"
        return f"FlexGen's own policy, which fills {share} of a memory at most, lacks {told} for a single row; choose another policy."


def search(dims: Dimensions, prompt: int, generated: int, constants: FlexgenConstants, *, weights_4bit: bool = False) -> Found:
    """FlexGen's own choice for a job: prompts of `prompt` tokens, `generated` tokens each.

    Raises:
        InfeasibleError: not even one row fits; names the memory and what it lacks.
    """
    return FlexgenSearch(dims, prompt, generated, constants, weights_4bit=weights_4bit).run()


def _micro_batches() -> Iterator[int]:
    rows = 1
    while True:
        yield rows
        rows = rows + 1 if rows < 4 else rows * 2
