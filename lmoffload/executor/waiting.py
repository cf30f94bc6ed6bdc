"""Rows that wait for a place in a block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.row import Row
from lmoffload_solver.errors import StatedError


class Waiting:
    """Rows not yet begun, those that need most room first, so that the first block needs most memory, and whoever waits fits wherever a row
    has finished.

    Args:
        places: of a block.
        refill: free places of a micro-batch that are taken at once (`Plan.refill`); None: places stay free until the block ends.
        restart: makes a row new that has been begun.
    """

    def __init__(self, rows: Sequence[Row], places: int, refill: int | None, restart: Callable[[Row], None]) -> None:
        self._rows = deque(_largest_first(rows))
        self.places, self._refill, self._restart = places, refill, restart

    def __len__(self) -> int:
        return len(self._rows)

    def first(self) -> list[Row]:
        """The rows of the next block, which stay."""
        return list(islice(self._rows, self.places))

    def take(self) -> list[Row]:
        """The rows of the next block, which go."""
        return [self._rows.popleft() for _ in range(min(self.places, len(self._rows)))]

    def fill(self, batches: Sequence[MicroBatch]) -> int:
        """Let rows take free places, where enough are free in a micro-batch or all who wait find one; returns how many did."""
        before = len(self)
        for batch in batches:
            free = batch.free_places
            if self._refill is None or len(free) < min(self._refill, len(self._rows)):
                continue
            for place in free:
                row = next((row for row in self._rows if row.room <= batch.rooms[place]), None)  # the first, but for rows put back
                if row is not None:
                    self._rows.remove(row)
                    batch.put(place, row)
        return before - len(self)

    def shrink(self, batches: Sequence[MicroBatch]) -> None:
        """Memory is short: a block's last micro-batch goes back to wait and gives its memory back; the only one comes again with half its
        rows. Blocks stay as small.

        Raises:
            StatedError: one row alone was left.
        """
        active = [batch for batch in batches if not batch.done]
        rows = active[-1].evict()
        if len(active) == 1 and len(rows) == 1:
            raise StatedError(
                "Memory is short even for one prompt at a time, since others use what the plan counts on; what was finished is kept: "
                "free memory and run again, or give --host-memory what there is."
            )
        self.places = sum(len(batch.rooms) for batch in active[:-1]) or len(rows) // 2
        for row in rows:
            self._restart(row)
        self._rows = deque(_largest_first([*rows, *self._rows]))


def _largest_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row.room, -len(row.tokens)))
