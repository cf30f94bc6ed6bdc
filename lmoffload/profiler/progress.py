"""How far a profile is, and how its time is shared among what is still to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """What is measured now."""

    what: str
    """E.g. "disk read, 4 in flight"."""
    index: int
    """Stages ended, 0 ... total."""
    total: int
    elapsed_s: float
    remaining_s: float
    """Predicted: what is left of the budget, or less when stages end early."""


class Clock:
    """A time budget shared among named stages by weight: what one stage leaves or overdraws, the later ones share."""

    def __init__(self, budget_s: float, weights: dict[str, float], on_progress: Callable[[Progress], None] | None = None) -> None:
        self._begin = time.perf_counter()
        self._budget_s = budget_s
        self._left = dict(weights)
        self._total = len(weights)
        self._on_progress = on_progress

    def start(self, stage: str) -> float:
        """Begin a stage; returns the seconds it may take."""
        share = self._left.pop(stage)
        left = self._remaining_s()
        self.tell(stage, ended=self._total - len(self._left) - 1)
        return left * share / (share + sum(self._left.values()))

    def skip(self, stage: str) -> None:
        """Leave a stage out; the others share its time."""
        del self._left[stage]

    def tell(self, what: str, ended: int | None = None) -> None:
        """Report progress inside a stage."""
        if self._on_progress is not None:
            index = self._total - len(self._left) - 1 if ended is None else ended
            elapsed = time.perf_counter() - self._begin
            self._on_progress(Progress(what, max(0, index), self._total, elapsed, self._remaining_s()))

    def end(self) -> None:
        """Report the end."""
        if self._on_progress is not None:
            self._on_progress(Progress("done", self._total, self._total, time.perf_counter() - self._begin, 0.0))

    def _remaining_s(self) -> float:
        return max(0.0, self._budget_s - (time.perf_counter() - self._begin))
