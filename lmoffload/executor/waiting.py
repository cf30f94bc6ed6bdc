"""Rows that wait for a place in a block."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.row import Row


class Waiting:
    """Rows not yet begun, those that need most room first, so that the first block needs most memory, and whoever waits fits wherever a row
    has finished.

    Args:
        refill: free places of a micro-batch that are taken at once (`Plan.refill`); None: places stay free until the block ends.
    """

    def __init__(self, rows: Sequence[Row], refill: int | None) -> None:
        self._rows = deque(sorted(rows, key=lambda row: (-row.room, -len(row.tokens))))
        self._refill = refill

    def __len__(self) -> int:
        return len(self._rows)

    def first(self, count: int) -> list[Row]:
        """The next rows, which stay."""
        return list(islice(self._rows, count))

    def take(self, count: int) -> list[Row]:
        """The next rows, which go."""
        return [self._rows.popleft() for _ in range(min(count, len(self._rows)))]

    def fill(self, batches: Sequence[MicroBatch]) -> int:
        """Let rows take free places, where enough are free in a micro-batch or all who wait find one; returns how many did."""
        before = len(self)
        for batch in batches:
            free = batch.free_places
            if self._refill is None or len(free) < min(self._refill, len(self._rows)):
                continue
            for place, row in zip(free, self.take(len(free)), strict=False):
                batch.put(place, row)
        return before - len(self)
