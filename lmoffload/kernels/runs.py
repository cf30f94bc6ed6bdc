"""Runs of a pool that are put off, to be done in one go, and again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from lmoffload.kernels.board import Call, Program


class Rooms:
    """Memory for what works write that are done one after another, never two at a time: what one has taken, the next one takes again."""

    def __init__(self) -> None:
        self._rooms: defaultdict[tuple[object, ...], list[torch.Tensor]] = defaultdict(list)
        self._taken: Counter[tuple[object, ...]] = Counter()

    def begin(self) -> None:
        """Another work begins."""
        self._taken.clear()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next room of this kind; contents undefined."""
        kind = *shape, dtype
        rooms, index = self._rooms[kind], self._taken[kind]
        if index == len(rooms):
            rooms.append(torch.empty(tuple(shape), dtype=dtype))
        self._taken[kind] += 1
        return rooms[index]


class Mark(NamedTuple):
    """A piece of work that is timed."""

    parts: tuple[tuple[int, float], ...]
    """Its stages, with its share of each."""
    size: float
    """To share stages by."""
    done_s: float
    """Of it that is done."""
    tell: Callable[[float], None]

    def later(self, stages: int) -> Mark:
        """The same behind so many stages more."""
        return self._replace(parts=tuple((stage + stages, share) for stage, share in self.parts))


class Runs:
    """Runs that are done in one go."""

    def __init__(self, program: Program | None, marks: Sequence[Mark]) -> None:
        self.program, self.marks = program, marks
        self.begin_s = 0.0
        """When they were begun, the last time."""

    @staticmethod
    def of(stages: Sequence[Sequence[Call]], marks: Sequence[Mark]) -> Runs:
        """Of these stages."""
        return Runs(Program.of(stages) if stages else None, marks)

    @staticmethod
    def in_a_row(runs: Sequence[Runs]) -> tuple[Runs, list[int]]:
        """All runs, one after another, and the stage before which each ends."""
        programs = [one.program for one in runs if one.program is not None]
        ends = list(accumulate(0 if one.program is None else one.program.num_stages for one in runs))
        marks = [mark.later(first) for first, one in zip([0, *ends], runs, strict=False) for mark in one.marks]
        return Runs(Program.in_a_row(programs), marks), ends

    def spans(self, ends: Sequence[int]) -> list[tuple[float, float]]:
        """(begin_s, end_s) of parts that end before these stages."""
        assert self.program is not None
        all_ends_s = [self.begin_s, *self.program.ends_s]
        return list(pairwise([self.begin_s, *(all_ends_s[end] for end in ends)]))


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

    def lay_abreast(self, lanes: Sequence[tuple[int, int]]) -> None:
        """Do the first of some ranges of stages [first, end), which follow one another up to the last stage, side by side, then the second
        of each, ...: calls of one function become one stage."""
        begin = lanes[0][0]
        stages, places = self.stages[:begin], dict[int, int]()
        for level in range(max(end - first for first, end in lanes)):
            at: dict[int, int] = {}
            for first, end in lanes:
                if (index := first + level) < end:
                    calls = self.stages[index]
                    place = places[index] = at.setdefault(calls[0].entry, len(stages))
                    if place == len(stages):
                        stages.append([])
                    stages[place] = [*stages[place], *calls]
        moved = [[places.get(stage, stage) for stage, _ in mark.parts] for mark in self.marks]
        sizes: dict[int, float] = defaultdict(float)
        for mark, its in zip(self.marks, moved, strict=True):
            for stage in its:
                sizes[stage] += mark.size
        self.stages[:] = stages
        for i, (mark, its) in enumerate(zip(self.marks, moved, strict=True)):
            self.marks[i] = mark._replace(parts=tuple((stage, mark.size / sizes[stage]) for stage in its))
