"""How much of a job is done while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmoffload.executor.meter import Meter
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.request import Progress
from lmoffload.executor.row import Row
from lmoffload_solver.plan import Plan


class Pace:
    """Weighs a prompt's tokens by the plan's seconds of prefill for each, and new tokens by its seconds of decoding. Begins now."""

    def __init__(self, plan: Plan, rows: Sequence[Row]) -> None:
        work, predicted = plan.workload, plan.predicted
        self._prompt_token_s = predicted.prefill_s / work.prompt_tokens
        self._new_token_s = predicted.decode_s / (work.num_prompts * max(1, work.gen_len - 1))
        self._num_prompts, self._num_done, self._tokens = len(rows), 0, 0
        self._total_s = sum(self._seconds(row, row.request.max_new_tokens) for row in rows)
        self._done_s = 0.0
        self._began = time.perf_counter()

    def after(self, step: int, block: int, batches: Sequence[MicroBatch], finished: Sequence[Row], meter: Meter) -> Progress:
        """A step of a block has ended, and some rows with it."""
        self._num_done += len(finished)
        self._tokens += sum(len(row.generated) for row in finished)
        self._done_s += sum(self._seconds(row, row.request.max_new_tokens) for row in finished)
        active = [row for batch in batches for row in batch.rows if row.active]
        done_s = self._done_s + sum(self._seconds(row, len(row.generated)) for row in active)
        tokens = self._tokens + sum(len(row.generated) for row in active)
        share = done_s / self._total_s if self._total_s else self._num_done / self._num_prompts
        elapsed_s, binds = time.perf_counter() - self._began, max(meter.busy, key=lambda resource: meter.busy[resource])
        return Progress(step, block, self._num_done, self._num_prompts, share, self._total_s, tokens, elapsed_s, binds)

    def _seconds(self, row: Row, new_tokens: int) -> float:
        """A prompt and so many new tokens, the first of which its prefill gives."""
        return self._prompt_token_s * len(row.request.token_ids) + self._new_token_s * (new_tokens - 1)
