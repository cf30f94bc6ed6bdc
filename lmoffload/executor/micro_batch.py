"""One micro-batch: its rows, its cache, and its forward in a greenlet that stops at every unit."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import greenlet
import numpy as np
import torch

from lmoffload.executor.kv_cache import KVCache, kv_bytes
from lmoffload.executor.packing import Packed, pack_newest, pack_prompts
from lmoffload.executor.request import Score
from lmoffload.executor.row import Row
from lmoffload.kernels.attention import prefill_attention
from lmoffload.kernels.decode_attention import decode_attention
from lmoffload.kernels.pool import Pool
from lmoffload.modeling.bind import lookup
from lmoffload_solver import counting
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import Spilled

SCORED_TOGETHER = 32
"""Positions whose probabilities are computed at once: a copy of so many logits."""


@dataclass(slots=True)
class Forward:
    """The forward of one chunk, suspended between two units."""

    packed: Packed
    thread: Any
    """Its greenlet."""
    logits: torch.Tensor | None = None


class MicroBatch:
    """Rows that are computed together."""

    def __init__(
        self,
        index: int,
        rows: Sequence[Row],
        shape: ModelShape,
        plan: Plan,
        pool: Pool,
        every_logit: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.index = index
        self.rows = list(rows)
        self._layers = shape.layers
        self._formats = plan.kv.format
        self._on_disk = frozenset(layer for layer, number, tier in plan.kv.homes if tier == "disk" and number == index)
        self._row_tokens = [len(row.tokens) + row.request.max_new_tokens for row in rows]
        self.cache: KVCache | None = None
        self._pool = pool
        self._token_multiple = counting.token_multiple(shape)
        self._every_logit = every_logit
        self._keep_logits = keep_logits
        self._prefill_chunk = plan.prefill_chunk
        self._prefill = True
        self._forwards: list[Forward] = []
        self._current: Packed | None = None
        self._carried: tuple[torch.Tensor, torch.Tensor] | None = None
        """Keys and values so far, at the layer being computed, of the row that the next chunk goes on with."""
        self.logits: torch.Tensor | None = None
        self.attended_s = 0.0
        """Seconds of the last attention, storing keys and values left out."""
        self.tokens_taken = 0
        """Tokens that the last `take_tokens` chose."""
        self.kept_logits: list[torch.Tensor] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that this micro-batch's cache takes in memory."""
        return kv_bytes([layer for i, layer in enumerate(self._layers) if i not in self._on_disk], self._row_tokens, self._formats)

    @property
    def spilled(self) -> dict[int, Spilled]:
        """Keys and values on the disk, by layer."""
        formats = self._formats.key, self._formats.value
        return {layer: counting.spilled(self._layers[layer], self._row_tokens, *formats) for layer in sorted(self._on_disk)}

    def changed_pages(self, layer: int) -> list[tuple[int, int]]:
        """Bytes [begin, end) of a layer's staging buffer that the current decode step has changed."""
        assert self.cache is not None and self._current is not None
        positions = np.asarray([piece.first for piece in self._current.pieces], dtype=np.int64)
        return self.cache.layers[layer].pages(self._current.rows, positions)

    def allocate(self) -> None:
        """Allocate the cache."""
        self.cache = KVCache(self._layers, self._row_tokens, self._formats, self._on_disk)

    def release(self) -> None:
        """Drop the cache."""
        self.cache = None

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Tokens [begin, end) of each row in the chunk being computed."""
        assert self._current is not None
        return self._current.segments

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(tokens attended to before, tokens with the newest) of each row in the chunk being computed."""
        assert self._current is not None
        return self._current.spans

    @property
    def num_forwards(self) -> int:
        """Forwards of the current step: one, or one for each chunk."""
        return len(self._forwards)

    @property
    def num_tokens(self) -> int:
        """Tokens of the current step, padding included."""
        return sum(len(forward.packed.token_ids) for forward in self._forwards)

    @property
    def done(self) -> bool:
        return not any(row.active for row in self.rows)

    @property
    def suspended(self) -> bool:
        """The forward has begun and not ended."""
        return bool(self._forwards)

    @property
    def active_rows(self) -> list[Row]:
        return [row for row in self.rows if row.active]

    def begin(self, model: Any, table_rows: Callable[[Sequence[int]], torch.Tensor], prefill: bool) -> int:
        """Begin a step's forward; returns the first unit reached (after the embedding)."""
        self._prefill, self.logits = prefill, None
        rows, tokens = [i for i, row in enumerate(self.rows) if row.active], [row.tokens for row in self.rows]
        if prefill:
            chunks = pack_prompts(rows, tokens, self._prefill_chunk, self._token_multiple)
        else:
            chunks = [pack_newest(rows, tokens, self._token_multiple)]
        reached = None
        for packed in chunks:
            input_ids = lookup(model, table_rows(packed.token_ids))
            num_tokens = packed.segments[-1][1]
            keep = torch.tensor(list(range(num_tokens)) if self._every_logit else packed.newest, dtype=torch.int64)
            options = {"input_ids": input_ids, "position_ids": torch.tensor([packed.positions]), "logits_to_keep": keep}
            thread = greenlet.greenlet(partial(_logits, model, options))
            thread.gr_context = contextvars.copy_context()
            self._forwards.append(Forward(packed, thread))
            self._current = packed
            reached = int(thread.switch())
            lookup(model, torch.empty(0, model.config.hidden_size))  # the looked-up rows have been consumed
        assert reached is not None
        return reached

    def resume(self, head: bool = False) -> int | None:
        """Compute the unit at which the forward waits; returns the next one reached, or None at the end, with `logits` then set.

        head: the unit is (a piece of) the output head, which chunks that no row ends in do not need.
        """
        if head:
            for forward in self._forwards:
                if not (forward.packed.newest or self._every_logit):
                    forward.thread.throw(greenlet.GreenletExit)
            self._forwards = [forward for forward in self._forwards if not forward.thread.dead]
        reached = None
        for forward in self._forwards:
            self._current = forward.packed
            result = forward.thread.switch()
            if forward.thread.dead:
                forward.logits = result
            else:
                reached = int(result)
        if reached is None:
            found = [forward.logits for forward in self._forwards if forward.logits is not None]
            self.logits = found[0] if len(found) == 1 else torch.cat(found)
            self._forwards = []
        return reached

    def abandon(self) -> None:
        """Drop a forward that will not be finished."""
        for forward in self._forwards:
            forward.thread.throw(greenlet.GreenletExit)
        self._forwards, self._carried = [], None

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
        packed = self._current
        assert packed is not None and self.cache is not None
        cache = self.cache.layers[layer]
        if self._prefill:
            for piece, (begin, end) in zip(packed.pieces, packed.segments, strict=True):
                cache.store_prompt(piece.row, piece.first, key[begin:end], value[begin:end], self._pool)
            begin_s = time.perf_counter()
            options = {"scaling": scaling, "window": cache.shape.window, "softcap": softcap, "sinks": sinks}
            attended = self._attend_prompts(packed, query, key, value, options)
            self.attended_s = time.perf_counter() - begin_s
            return attended
        rows, count = packed.rows, len(packed.rows)
        positions = np.asarray(packed.positions[:count], dtype=np.int64)
        cache.store_tokens(rows, positions, key[:count], value[:count])
        out, begin_s = torch.zeros(query.shape[0], query.shape[1], value.shape[2]), time.perf_counter()
        out[:count] = decode_attention(
            query[:count].contiguous(), cache.keys, cache.values, rows, positions + 1,
            scaling=scaling, window=cache.shape.window, softcap=softcap, sinks=sinks, pool=self._pool,
        )  # fmt: skip
        self.attended_s = time.perf_counter() - begin_s
        return out

    def _attend_prompts(
        self, packed: Packed, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Every prompt attends to its own fresh keys and values, as they were before they were rounded to what is stored; those of a row
        that an earlier chunk began are carried over to the next."""
        segments, carried = packed.segments, self._carried
        begun = [segment for piece, segment in zip(packed.pieces, segments, strict=True) if piece.first == 0]
        out = prefill_attention(query, key, value, begun, pool=self._pool, **options)
        begin, end = segments[-1]
        self._carried = None if packed.pieces[-1].last else (key[begin:end].clone(), value[begin:end].clone())
        if packed.pieces[0].first > 0:
            assert carried is not None
            begin, end = segments[0]
            keys, values = (torch.cat((old, new[begin:end])) for old, new in zip(carried, (key, value), strict=True))
            known, whole = packed.pieces[0].first, [(0, keys.shape[0])]
            out[begin:end] = prefill_attention(query[begin:end], keys, values, whole, known=known, pool=self._pool, **options)
            if len(segments) == 1 and not packed.pieces[0].last:
                self._carried = keys, values
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
            logits = logits[self._ends() - 1]
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
        begin = 0
        for row, end in zip(self.active_rows, self._ends().tolist(), strict=True):
            known = len(row.tokens)
            given = (*row.tokens, *row.forced[len(row.generated) :])[known - (end - begin) + 1 : known + 1]
            for at in range(0, len(given), SCORED_TOGETHER):
                targets = torch.tensor(given[at : at + SCORED_TOGETHER])
                part = logits[begin + at : begin + at + len(targets)]
                chosen = torch.log_softmax(part, dim=-1).gather(1, targets[:, None])[:, 0]
                row.scores.append(Score(chosen, part.argmax(dim=-1)))
            begin = end

    def _ends(self) -> torch.Tensor:
        """Where each active row's tokens of this step end, all rows one after another."""
        return torch.tensor([len(row.tokens) if self._prefill else 1 for row in self.active_rows]).cumsum(0)


def _logits(model: Any, options: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(use_cache=False, **options).logits[0]  # type: ignore[no-any-return]


def _contains(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)
