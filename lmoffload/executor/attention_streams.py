"""The host's attention in several streams: each has threads of its own, on cores of its own, and attends to some of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lmoffload.executor.resources import Queue
from lmoffload.kernels.decode_attention import Newest
from lmoffload.kernels.kv_rows import KVRows, Memo, Numbers
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.processor import HostProcessor


@dataclass(frozen=True)
class StreamedAttention(HostProcessor):
    """The host's kernels; a micro-batch's rows are shared out to streams by their lengths. A row's result does not depend on its stream."""

    others: tuple[tuple[Queue, Pool], ...] = ()
    """Of each further stream who calls, and its threads; the calling thread and `pool` are the first."""

    def decode(
        self, q: torch.Tensor, keys: KVRows, values: KVRows, rows: Numbers, lengths: Numbers, newest: Newest, **options: Any
    ) -> torch.Tensor:
        parts = shares(lengths, 1 + len(self.others))
        if len(parts) == 1:
            return super().decode(q, keys, values, rows, lengths, newest, **options)
        found: list[torch.Tensor] = [q] * len(parts)

        def attend(number: int, pool: Pool) -> None:
            own = slice(parts[number].start, parts[number].stop)
            of_these = Newest(newest.key[own], newest.value[own], newest.most[own], Memo())
            found[number] = HostProcessor(pool).decode(q[own], keys, values, rows[own], lengths[own], of_these, **options)

        theirs = zip(range(1, len(parts)), self.others, strict=False)
        events = [queue.enqueue(partial(attend, number, pool)) for number, (queue, pool) in theirs]
        attend(0, self.pool)
        for event in events:
            event.wait()
        return torch.cat(found)


def shares(lengths: Numbers, count: int) -> Sequence[range]:
    """Runs of rows of about equal length together, none empty, `count` or as many as there are rows."""
    ends = np.cumsum(lengths)
    count = min(count, len(lengths))
    cuts = [0]
    for part in range(1, count):
        nearest = int(np.searchsorted(ends, ends[-1] * part / count)) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(lengths) - (count - part)))
    cuts.append(len(lengths))
    return [range(first, end) for first, end in pairwise(cuts)]
