"""Lengths: the prompt lengths of a job, longest first, and their means over runs of sequences.

A function of the length is constant within a group of equal prompts, so its running sum is linear between the groups' bounds, and means
over any run are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lmoffload_solver.workload import Workload

Amount: TypeAlias = Any
"""A number, or an array of them: prices are taken of one micro-batch, or of every one of the domain at once."""


Array: TypeAlias = npt.NDArray[np.float64]


class Lengths:
    """Sequences [first, end) of a job, longest first, are a run; `first` and `end` may be arrays of runs."""

    def __init__(self, workload: Workload) -> None:
        groups = sorted(workload.prompts, key=lambda group: -group.length)
        self.values = np.array([group.length for group in groups], dtype=np.float64)
        self._counts = np.array([group.count for group in groups], dtype=np.float64)
        self._bounds = np.concatenate(([0.0], np.cumsum(self._counts)))
        self._running: dict[object, Array] = {}

    @cached_property
    def are_equal(self) -> bool:
        """Whether all prompts are of one length."""
        return len(np.unique(self.values)) == 1

    def mean(self, key: object, of_lengths: Callable[[Array], Array], first: Amount, end: Amount) -> Amount:
        """Mean of a function of the length over a run; `key` names the function."""
        if key not in self._running:
            values = np.asarray(of_lengths(self.values))
            self._running[key] = values if self.are_equal else np.concatenate(([0.0], np.cumsum(values * self._counts)))
        running = self._running[key]
        if self.are_equal:
            return float(running[0])
        return (np.interp(end, self._bounds, running) - np.interp(first, self._bounds, running)) / (end - first)

    def tokens(self, first: Amount, end: Amount) -> Amount:
        """Mean length."""
        return self.mean("tokens", lambda lengths: lengths, first, end)

    def kept(self, window: int | None, more: int, first: Amount, end: Amount) -> Amount:
        """Mean number of tokens whose keys and values a layer keeps `more` tokens after the prompt: a sliding window caps them."""
        most = np.inf if window is None else window
        return self.mean((window, more), lambda lengths: np.minimum(lengths + more, most), first, end)
