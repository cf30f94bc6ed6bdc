"""How much of a job is done while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lmoffload.executor.meter import Meter
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.request import Progress, Request
from lmoffload.executor.row import Row
from lmoffload_solver.plan import Plan


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """A plan's seconds of prefill for each token of a prompt, and of decoding for each new token but the first."""

    prompt_s: float
    later_s: float

    @staticmethod
    def of(plan: Plan) -> TokenSeconds:
        work, predicted = plan.workload, plan.predicted
        return TokenSeconds(predicted.prefill_s / work.prompt_tokens, predicted.decode_s / (work.num_prompts * max(1, work.gen_len - 1)))

    def seconds(self, request: Request, new_tokens: int | None = None) -> float:
        """A prompt's share of the job with so many new tokens, as many as it may have unless given."""
        count = request.max_new_tokens if new_tokens is None else new_tokens
        return self.prompt_s * len(request.token_ids) + self.later_s * (count - 1)


class Pace:
    """Weighs prompts and completions as the plan does. Begins now."""

    def __init__(self, plan: Plan, rows: Sequence[Row]) -> None:
        self._token_seconds = TokenSeconds.of(plan)
        self._num_prompts, self._num_done, self._tokens = len(rows), 0, 0
        self._total_s = sum(self._token_seconds.seconds(row.request) for row in rows)
        self._done_s = 0.0
        self._began = time.perf_counter()

    def after(self, step: int, block: int, batches: Sequence[MicroBatch], finished: Sequence[Row], meter: Meter) -> Progress:
        """A step of a block has ended, and some rows with it."""
        self._num_done += len(finished)
        self._tokens += sum(len(row.generated) for row in finished)
        self._done_s += sum(self._token_seconds.seconds(row.request) for row in finished)
        active = [row for batch in batches for row in batch.rows if row.active]
        done_s = self._done_s + sum(self._token_seconds.seconds(row.request, len(row.generated)) for row in active if not row.fresh)
        tokens = self._tokens + sum(len(row.generated) for row in active)
        share = done_s / self._total_s if self._total_s else self._num_done / self._num_prompts
        elapsed_s, binds = time.perf_counter() - self._began, max(meter.busy, key=lambda server: meter.busy[server])[0]
        return Progress(
            step, block, not active, self._num_done, self._num_prompts, share, self._total_s, tokens, elapsed_s, binds
        )  # fmt: skip
