"""One micro-batch: its rows, its cache, and its forward in a greenlet that stops at every unit."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import greenlet
import numpy as np
import torch
from torch.nn import functional

from lmoffload.executor.kv_cache import KVCache, kv_bytes
from lmoffload.executor.packing import Packed, pack_newest, pack_prompts
from lmoffload.executor.row import Row
from lmoffload.executor.standing import Standing
from lmoffload.kernels.decode_attention import Newest
from lmoffload.kernels.kv_rows import Run
from lmoffload.kernels.pool import timed
from lmoffload.kernels.processor import Processor
from lmoffload.modeling.bind import lookup
from lmoffload_solver import counting
from lmoffload_solver.costs import Phase
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan
from lmoffload_solver.schedule import Spilled


@dataclass(slots=True)
class Forward:
    """The forward of one chunk, suspended between two units."""

    phase: Phase
    packed: Packed
    thread: Any
    """Its greenlet."""
    logits: torch.Tensor | None = None


class MicroBatch:
    """Rows that are computed together. Each has a place, with room for as many tokens as the row that came first; when it has finished,
    another that needs no more may take it."""

    def __init__(
        self,
        index: int,
        rows: Sequence[Row],
        shape: ModelShape,
        plan: Plan,
        processor: Processor,
        every_logit: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.index = index
        self.rows = list(rows)
        self._layers = shape.layers
        self._alike = [shape.layers.index(layer) for layer in shape.layers]
        """For each layer the first one of its shape."""
        self._formats = plan.kv.format
        self._on_disk = frozenset(layer for layer, number, tier in plan.kv.homes if tier == "disk" and number == index)
        self.rooms = tuple(row.room for row in rows)
        self.cache: KVCache | None = None
        self._processor = processor
        self._token_multiple = counting.token_multiple(shape)
        self._every_logit = every_logit
        self._keep_logits = keep_logits
        self._prefill_chunk = plan.prefill_chunk
        self._forwards: list[Forward] = []
        self._now: Forward | None = None
        self._carried: tuple[torch.Tensor, torch.Tensor] | None = None
        """Keys and values so far, at the layer being computed, of the row that the next chunk goes on with."""
        self.logits: torch.Tensor | None = None
        self._ended: list[int] = []
        """Places of the rows that `logits` are of."""
        self.computed: list[tuple[float, float]] = []
        """See `modeling.runtime.Batch`."""
        self._standing: Standing | None = None
        """Of the decode step under way."""
        self.tokens_taken = 0
        """Tokens that the last `take_tokens` chose."""
        self.tokens_held = 0
        """Keys and values that were kept for those rows then, in tokens."""
        self.first_tokens_taken = 0
        """Those of them that are their rows' first."""
        self.kept_logits: list[torch.Tensor] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that this micro-batch's cache takes in memory."""
        return kv_bytes([layer for i, layer in enumerate(self._layers) if i not in self._on_disk], self.rooms, self._formats)

    @property
    def spilled(self) -> dict[int, Spilled]:
        """Keys and values on the disk, by layer."""
        formats = self._formats.key, self._formats.value
        return {layer: counting.spilled(self._layers[layer], self.rooms, *formats) for layer in sorted(self._on_disk)}

    def changed_pages(self, layer: int) -> list[tuple[int, int]]:
        """Bytes [begin, end) of a layer's staging buffer that the step under way has changed."""
        assert self.cache is not None
        pieces = [piece for forward in self._forwards for piece in forward.packed.pieces]
        rows = np.concatenate([np.full(piece.end - piece.first, piece.row, dtype=np.int64) for piece in pieces])
        positions = np.concatenate([np.arange(piece.first, piece.end, dtype=np.int64) for piece in pieces])
        return self.cache.layers[layer].pages(rows, positions)

    def allocate(self) -> None:
        """Allocate the cache."""
        self.cache = KVCache(self._layers, self.rooms, self._formats, self._on_disk)

    def release(self) -> None:
        """Drop the cache."""
        self.cache = self._standing = None

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Tokens [begin, end) of each row in the forward being computed."""
        assert self._now is not None
        return self._now.packed.segments

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(tokens attended to before, tokens with the newest) of each row in the forward being computed."""
        assert self._now is not None
        return self._now.packed.spans

    @property
    def standing(self) -> Standing | None:
        """See `modeling.runtime.Batch`."""
        assert self._now is not None
        standing = self._standing if self._now.phase == "decode" and not self._on_disk else None
        return standing if standing is not None and standing.steps > 1 else None  # rows that come and go would be recorded again and again

    @property
    def forwards(self) -> list[tuple[Phase, int, int]]:
        """Phase, tokens (padding included) and rows that end in it, of each forward of the step: of the rows that decode, and of the
        prompts, whole or each chunk."""
        return [(one.phase, len(one.packed.token_ids), len(one.packed.newest)) for one in self._forwards]

    @property
    def padding(self) -> int:
        """Tokens of the step that are computed and are nobody's."""
        return sum(len(one.packed.token_ids) - one.packed.segments[-1][1] for one in self._forwards)

    @property
    def done(self) -> bool:
        return not any(row.active for row in self.rows)

    @property
    def suspended(self) -> bool:
        """The forward has begun and not ended."""
        return bool(self._forwards)

    @property
    def most_steps(self) -> int:
        """Steps that its rows still take at most."""
        return max((row.most_steps for row in self.rows if row.active), default=0)

    @property
    def free_places(self) -> list[int]:
        """Places whose rows have finished."""
        return [place for place, row in enumerate(self.rows) if not row.active]

    def put(self, place: int, row: Row) -> None:
        """Let a row that has not begun take a free place, between two steps."""
        assert row.fresh and not self.rows[place].active and row.room <= self.rooms[place]
        self.rows[place] = row

    def evict(self) -> list[Row]:
        """Give up the rows that have not finished, between two steps, and the memory."""
        rows = [row for row in self.rows if row.active]
        self.rows = []
        self.release()
        return rows

    def begin(
        self, model: Any, table_rows: Callable[[Sequence[int]], torch.Tensor], enter: Callable[[Phase], None] = lambda phase: None
    ) -> int:
        """Begin a step: a forward of the rows that decode, and one (or one for each chunk) of the prompts that are new. Returns the first
        unit reached (after the embedding). enter: called before each forward."""
        self.logits, self.computed, reached = None, [], None
        for phase, packed in self._packed():
            enter(phase)
            rows = table_rows(packed.token_ids).to(self._processor.device, self._processor.dtype)
            input_ids = lookup(model, rows)
            num_tokens = packed.segments[-1][1]
            keep = torch.tensor(list(range(num_tokens)) if self._every_logit else packed.newest, dtype=torch.int64)
            options = {"input_ids": input_ids, "position_ids": torch.tensor([packed.positions], device=rows.device)}
            options["logits_to_keep"] = keep.to(rows.device)
            thread = greenlet.greenlet(partial(_logits, model, options))
            thread.gr_context = contextvars.copy_context()
            self._now = Forward(phase, packed, thread)
            self._forwards.append(self._now)
            reached = int(thread.switch())
            lookup(model, torch.empty(0, model.config.hidden_size))  # the looked-up rows have been consumed
        assert reached is not None
        return reached

    def _packed(self) -> Iterator[tuple[Phase, Packed]]:
        tokens = [row.tokens for row in self.rows]
        active = [place for place, row in enumerate(self.rows) if row.active]
        if begun := [place for place in active if not self.rows[place].fresh]:
            packed = pack_newest(begun, tokens, self._token_multiple)
            if self._standing is None or not self._standing.goes_on(packed.rows, packed.lengths):
                self._standing = Standing.of(packed.rows, packed.lengths, self.rooms)
            yield "decode", packed
        if fresh := [place for place in active if self.rows[place].fresh]:
            for packed in pack_prompts(fresh, tokens, self._prefill_chunk, self._token_multiple):
                yield "prefill", packed

    def resume(self, head: bool = False, enter: Callable[[Phase], None] = lambda phase: None) -> int | None:
        """Compute the unit at which the step waits; returns the next one reached, or None at the end, with `logits` then set.

        head: the unit is (a piece of) the output head, which chunks that no row ends in do not need. enter: as in `begin`.
        """
        if head:
            for forward in self._forwards:
                if not (forward.packed.newest or self._every_logit):
                    forward.thread.throw(greenlet.GreenletExit)
            self._forwards = [forward for forward in self._forwards if not forward.thread.dead]
        reached = None
        for forward in self._forwards:
            enter(forward.phase)
            self._now = forward
            result = forward.thread.switch()
            if forward.thread.dead:
                forward.logits = result
            else:
                reached = int(result)
        if reached is None:
            found = [forward.logits for forward in self._forwards if forward.logits is not None]
            self.logits = found[0] if len(found) == 1 else torch.cat(found)
            pieces = [piece for forward in self._forwards for piece in forward.packed.pieces]
            self._ended, self._forwards = [piece.row for piece in pieces if piece.last], []
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
        tell: Callable[[float], None],
    ) -> torch.Tensor:
        """Attention of this micro-batch at a layer; see `modeling.runtime.Batch`."""
        assert self._now is not None and self.cache is not None
        packed, cache, pool = self._now.packed, self.cache.layers[layer], self._processor.pool
        options: dict[str, Any] = {"scaling": scaling, "window": cache.shape.window, "softcap": softcap, "sinks": sinks}
        if self._now.phase == "prefill":
            runs = [Run(piece.row, piece.first, *segment) for piece, segment in zip(packed.pieces, packed.segments, strict=True)]
            cache.store_prompts(runs, key, value, pool)
            return timed(pool, partial(self._attend_prompts, packed, query, key, value, options), tell)
        standing = self._standing
        assert standing is not None
        count, num_tokens = len(standing.rows), query.shape[0]
        if count < num_tokens:
            query, key, value = query[:count], key[:count], value[:count]
        newest = Newest(key.contiguous(), value.contiguous(), standing.most, standing.memos[self._alike[layer]])
        given = query.contiguous(), cache.keys, cache.values, standing.rows, standing.lengths, newest
        attended = timed(pool, partial(self._processor.decode, *given, **options), tell)
        if count == num_tokens:
            return attended
        if pool is not None:
            pool.settle()
        return functional.pad(attended, (0, 0, 0, 0, 0, num_tokens - count))

    def _attend_prompts(
        self, packed: Packed, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Every prompt attends to its own fresh keys and values, as they were before they were rounded to what is stored; those of a row
        that an earlier chunk began are carried over to the next."""
        segments, carried = packed.segments, self._carried
        begun = [segment for piece, segment in zip(packed.pieces, segments, strict=True) if piece.first == 0]
        out = self._processor.prefill(query, key, value, begun, **options)
        begin, end = segments[-1]
        self._carried = None if packed.pieces[-1].last else (key[begin:end].clone(), value[begin:end].clone())
        if packed.pieces[0].first > 0:
            assert carried is not None
            begin, end = segments[0]
            keys, values = (torch.cat((old, new[begin:end])) for old, new in zip(carried, (key, value), strict=True))
            known, whole = packed.pieces[0].first, [(0, keys.shape[0])]
            out[begin:end] = self._processor.prefill(query[begin:end], keys, values, whole, known=known, **options)
            if len(segments) == 1 and not packed.pieces[0].last:
                self._carried = keys, values
        return out

    def take_tokens(self, stop_ids: frozenset[int], decode: Callable[[Sequence[int]], str] | None) -> list[Row]:
        """Choose the next token of every row from the logits; returns the rows that have finished with it.

        Raises:
            StatedError: the logits hold a NaN or an infinity.
        """
        assert self.logits is not None
        rows, logits, self.logits = [self.rows[place] for place in self._ended], self.logits.float(), None
        least, most = torch.aminmax(logits)  # a NaN anywhere shows in both
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise StatedError("The model's logits are not finite: its weights or activations overflow in this precision.")
        if self._keep_logits:
            self.kept_logits.append(logits.cpu().clone())
        if self._every_logit:
            parts = torch.split(logits, [len(row.tokens) if row.fresh else 1 for row in rows])
            for row, part in zip(rows, parts, strict=True):
                row.score(part.cpu())
            logits = torch.stack([part[-1] for part in parts])
        self.tokens_taken, self.first_tokens_taken = len(rows), sum(row.fresh for row in rows)
        self.tokens_held = sum(len(row.tokens) for row in rows)
        likeliest = logits.argmax(dim=-1).tolist()
        finished = []
        for row, row_logits, first in zip(rows, logits, likeliest, strict=True):
            row.take(row.choose(row_logits, first), stop_ids, decode)
            if not row.active:
                finished.append(row)
        return finished


def _logits(model: Any, options: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(use_cache=False, **options).logits[0]  # type: ignore[no-any-return]
