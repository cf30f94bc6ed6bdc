"""One micro-batch: its rows, its cache, and its forward in a greenlet that stops at every unit."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import greenlet
import numpy as np
import torch

from lmoffload.executor.kv_cache import KVCache, kv_bytes
from lmoffload.executor.request import Request, Score
from lmoffload.executor.sampling import Sampler
from lmoffload.kernels.attention import decode_attention, prefill_attention
from lmoffload.kernels.pool import Pool
from lmoffload.modeling.bind import lookup
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape

SCORED_TOGETHER = 32
"""Positions whose probabilities are computed at once: a copy of so many logits."""


@dataclass(slots=True)
class Row:
    """One sequence as it grows."""

    request: Request
    sampler: Sampler
    tokens: list[int]
    """Prompt and generated tokens; the newest one has no keys and values yet."""
    finish_reason: Literal["stop", "length", "error"] | None = None
    generated: list[int] = field(default_factory=list)
    """Tokens of the completion, the end token left out."""
    forced: tuple[int, ...] = ()
    """Tokens that the completion takes, whatever is likelier: a given text that is scored."""
    scores: list[Score] = field(default_factory=list)
    """Of the tokens that were given, step by step, where they are asked for."""

    @property
    def active(self) -> bool:
        return self.finish_reason is None


@dataclass(frozen=True, slots=True)
class Packed:
    """The tokens of one step, those of all rows one after another, padded at the end."""

    rows: np.ndarray
    """Active rows."""
    token_ids: list[int]
    positions: list[int]
    segments: list[tuple[int, int]]
    """Tokens [begin, end) of each active row."""


class MicroBatch:
    """Rows that are computed together."""

    def __init__(
        self,
        index: int,
        rows: Sequence[Row],
        shape: ModelShape,
        pool: Pool,
        token_multiple: int,
        every_logit: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.index = index
        self.rows = list(rows)
        self._layers = shape.layers
        self._row_tokens = [len(row.tokens) + row.request.max_new_tokens for row in rows]
        self.cache: KVCache | None = None
        self._pool = pool
        self._token_multiple = token_multiple
        self._every_logit = every_logit
        self._keep_logits = keep_logits
        self._packed: Packed | None = None
        self._prefill = True
        self._forward: Any = None
        self.logits: torch.Tensor | None = None
        self.tokens_taken = 0
        """Tokens that the last `take_tokens` chose."""
        self.kept_logits: list[torch.Tensor] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that this micro-batch's cache takes."""
        return kv_bytes(self._layers, self._row_tokens)

    def allocate(self) -> None:
        """Allocate the cache."""
        self.cache = KVCache(self._layers, self._row_tokens)

    def release(self) -> None:
        """Drop the cache."""
        self.cache = None

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Tokens [begin, end) of each active row in the current step."""
        assert self._packed is not None
        return self._packed.segments

    @property
    def done(self) -> bool:
        return not any(row.active for row in self.rows)

    @property
    def suspended(self) -> bool:
        """The forward has begun and not ended."""
        return self._forward is not None

    @property
    def active_rows(self) -> list[Row]:
        return [row for row in self.rows if row.active]

    def begin(self, model: Any, table_rows: Callable[[Sequence[int]], torch.Tensor], prefill: bool) -> int:
        """Begin a step's forward; returns the first unit reached (after the embedding)."""
        self._prefill = prefill
        packed = self._packed = self._pack(prefill)
        input_ids = lookup(model, table_rows(packed.token_ids))
        ends = [end - 1 for _, end in packed.segments]
        keep = torch.arange(len(packed.token_ids)) if self._every_logit else torch.tensor(ends)
        positions = torch.tensor([packed.positions])

        def forward() -> torch.Tensor:
            out = model(input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=keep)
            return out.logits[0]  # type: ignore[no-any-return]

        self._forward = greenlet.greenlet(forward)
        self._forward.gr_context = contextvars.copy_context()
        self.logits = None
        reached = self.resume()
        lookup(model, torch.empty(0, model.config.hidden_size))  # the looked-up rows have been consumed
        assert reached is not None
        return reached

    def resume(self) -> int | None:
        """Compute the unit at which the forward waits; returns the next one reached, or None at the end, with `logits` then set."""
        result = self._forward.switch()
        if not self._forward.dead:
            return int(result)
        self._forward = None
        self.logits = result
        return None

    def abandon(self) -> None:
        """Drop a forward that will not be finished."""
        if self._forward is not None:
            self._forward.throw(greenlet.GreenletExit)
            self._forward = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of this micro-batch at a layer; see `modeling.runtime.Batch`."""
        packed = self._packed
        assert packed is not None and self.cache is not None
        cache = self.cache.layers[layer]
        if self._prefill:
            for row, (begin, end) in zip(packed.rows, packed.segments, strict=True):
                cache.store_prompt(int(row), key[begin:end], value[begin:end])
            window = cache.shape.window
            return prefill_attention(
                query, key, value, packed.segments, scaling=scaling, window=window, softcap=softcap, sinks=sinks, pool=self._pool
            )
        rows, count = packed.rows, len(packed.rows)
        positions = np.asarray(packed.positions[:count], dtype=np.int64)
        cache.store_tokens(rows, positions, key[:count], value[:count])
        out = torch.zeros(query.shape[0], query.shape[1], value.shape[2])
        out[:count] = decode_attention(
            query[:count].contiguous(),
            cache.keys,
            cache.values,
            torch.from_numpy(cache.key_starts[rows]),
            torch.from_numpy(cache.value_starts[rows]),
            torch.from_numpy(cache.capacities[rows]),
            torch.from_numpy(np.minimum(positions + 1, cache.capacities[rows])),
            num_kv_heads=cache.shape.num_kv_heads,
            value_dim=cache.shape.value_dim,
            scaling=scaling,
            window=None,  # the cache keeps no more than the window
            softcap=softcap,
            sinks=sinks,
            pool=self._pool,
        )
        return out

    def take_tokens(self, stop_ids: frozenset[int], decode: Callable[[Sequence[int]], str] | None) -> list[Row]:
        """Choose the next token of every active row from the logits; returns the rows that have finished with it.

        Raises:
            StatedError: the logits hold a NaN or an infinity.
        """
        assert self.logits is not None
        rows, logits, self.logits = self.active_rows, self.logits, None
        least, most = torch.aminmax(logits)  # a NaN anywhere shows in both
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise StatedError("The model's logits are not finite: its weights or activations overflow in this precision.")
        if self._keep_logits:
            self.kept_logits.append(logits.clone())
        if self._every_logit:
            self._take_scores(logits)
            logits = logits[[end - 1 for _, end in self.segments]]
        self.tokens_taken = len(rows)
        likeliest = logits.argmax(dim=-1).tolist()
        finished = []
        for row, row_logits, first in zip(rows, logits, likeliest, strict=True):
            if row.forced:
                token = row.forced[len(row.generated)]
            else:
                token = first if row.sampler.plain else row.sampler.next_token(row_logits, row.tokens)
            row.tokens.append(token)
            if token in stop_ids:
                row.finish_reason = "stop"
            else:
                row.generated.append(token)
                if row.request.stop and decode is not None and _contains(decode(row.generated), row.request.stop):
                    row.finish_reason = "stop"
                elif len(row.generated) >= row.request.max_new_tokens:
                    row.finish_reason = "length"
            if not row.active:
                finished.append(row)
        return finished

    def _take_scores(self, logits: torch.Tensor) -> None:
        """What each position of this step says of the token after it, where that is given, from the logits [T, vocabulary]."""
        for row, (begin, end) in zip(self.active_rows, self.segments, strict=True):
            known = len(row.tokens)
            given = (*row.tokens, *row.forced[len(row.generated) :])[known - (end - begin) + 1 : known + 1]
            for at in range(0, len(given), SCORED_TOGETHER):
                targets = torch.tensor(given[at : at + SCORED_TOGETHER])
                part = logits[begin + at : begin + at + len(targets)]
                chosen = torch.log_softmax(part, dim=-1).gather(1, targets[:, None])[:, 0]
                row.scores.append(Score(chosen, part.argmax(dim=-1)))

    def _pack(self, prefill: bool) -> Packed:
        rows = [i for i, row in enumerate(self.rows) if row.active]
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[tuple[int, int]] = []
        for i in rows:
            known = self.rows[i].tokens
            new = known if prefill else known[-1:]
            segments.append((len(tokens), len(tokens) + len(new)))
            positions += range(len(known) - len(new), len(known))
            tokens += new
        padding = -len(tokens) % self._token_multiple
        return Packed(np.asarray(rows, dtype=np.int64), tokens + [0] * padding, positions + [0] * padding, segments)


def _contains(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


def make_row(request: Request, defaults: Mapping[str, Any], vocab_size: int) -> Row:
    """A row for a request.

    Raises:
        StatedError: the prompt is empty or holds a token outside the vocabulary.
    """
    if not request.token_ids:
        raise StatedError("The prompt is empty.")
    if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
        raise StatedError(f"The prompt holds a token outside the model's vocabulary of {vocab_size}.")
    return Row(request, Sampler.of(request, defaults, vocab_size), list(request.token_ids))
