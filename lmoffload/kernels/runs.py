"""Runs of a pool that are put off, to be done in one go, and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lmoffload.kernels.board import Call, Program


class Rooms:
    """Memory for what works write that are done one after another, never two at a time: the n-th room of one is that of the next, where
    their sizes agree."""

    def __init__(self) -> None:
        self._rooms: list[torch.Tensor] = []
        self._taken = 0

    def begin(self) -> None:
        """Another work begins."""
        self._taken = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next room; contents undefined."""
        if self._taken == len(self._rooms):
            self._rooms.append(torch.empty(0))
        room = self._rooms[self._taken]
        if room.shape != tuple(shape) or room.dtype != dtype:
            room = self._rooms[self._taken] = torch.empty(tuple(shape), dtype=dtype)
        self._taken += 1
        return room


class Mark(NamedTuple):
    """Stages first..end belong to a piece of work that is timed."""

    first: int
    end: int
    done_s: float
    """Of it that is done."""
    tell: Callable[[float], None]


class Runs:
    """Runs that are done in one go."""

    def __init__(self, stages: Sequence[Sequence[Call]], marks: Sequence[Mark]) -> None:
        self.program, self.marks = Program(stages) if stages else None, marks


@dataclass(slots=True)
class Later:
    """What a thread's work has put off."""

    thread: int
    rooms: Rooms
    stages: list[Sequence[Call]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    was_settled: bool = False

    def take(self, jobs: Sequence[object]) -> bool:
        """Put jobs off, if all are calls."""
        calls = [job for job in jobs if isinstance(job, Call)]
        if calls and len(calls) == len(jobs):
            self.stages.append(calls)
        return len(calls) == len(jobs)
