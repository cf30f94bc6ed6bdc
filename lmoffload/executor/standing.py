"""Rows that take one step after another, and what stays as it is meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lmoffload.kernels.kv_rows import Memo, Numbers

LEAST_ROOM = 64
"""Tokens."""


@dataclass(eq=False)
class Standing:
    """Rows of a micro-batch that decode."""

    rows: Numbers
    """int64 [R], their places."""
    lengths: Numbers
    """int64 [R] tokens with the newest: always in the same memory, counted on with each step."""
    most: Numbers
    """int64 [R], what the lengths may come to while these stand: to twice what they were, so that work is shared out anew as it grows."""
    memos: dict[int, Memo] = field(default_factory=lambda: defaultdict(Memo))
    """What attention to them has in common at layers alike, by the first of these."""
    steps: int = 1
    """That they have taken, with the one under way."""

    @staticmethod
    def of(rows: Numbers, lengths: Numbers, rooms: Sequence[int]) -> Standing:
        """rooms: tokens that the row at each place may come to."""
        doubled = [max(LEAST_ROOM, 1 << int(length).bit_length()) for length in lengths]
        most = np.minimum(np.array(doubled, dtype=np.int64), np.array(rooms, dtype=np.int64)[rows])
        return Standing(rows, lengths.copy(), np.maximum(most, lengths))

    def goes_on(self, rows: Numbers, lengths: Numbers) -> bool:
        """Take other lengths of the same rows; False where they are not the same, or have grown too long."""
        if not np.array_equal(rows, self.rows) or (lengths > self.most).any():
            return False
        self.lengths[:] = lengths
        self.steps += 1
        return True
