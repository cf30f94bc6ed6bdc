"""How few tokens go through layers, recorded once and done again without Python.

With one token a layer of a 1B model is computed in a millisecond, and Python, cold after the weights that went through the caches, takes
another to say what is to be computed: the same every time, but for what it is computed from. So what a layer runs is kept with the
memory that it reads and writes, and the next tokens are put there. Where rows decode step after step and everything stays where it is,
layers that follow one another are done in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lmoffload.kernels.pool import Pool
from lmoffload.kernels.runs import Rooms, Runs
from lmoffload.modeling.linear import BoundLinear
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.memory import RECORDED_SIZES

Result = TypeVar("Result")
Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Of positions: cosines and sines."""


class Anyone:
    """Stands for what does not stand still."""


ANYONE = Anyone()


class Recorder:
    """Keeps the records of a model's layers, which are computed one after another, each without a stop."""

    def __init__(self, runtime: Runtime, pool: Pool) -> None:
        self.runtime, self._pool = runtime, pool
        self._sizes: dict[int, tuple[Rooms, WeakKeyDictionary[object, Kept]]] = {}
        self._follows: dict[nn.Module, nn.Module] = {}
        """By layer the one before, which has given it what it takes, untouched."""
        self._left: WeakKeyDictionary[object, Left] = WeakKeyDictionary()
        self._ahead: WeakKeyDictionary[object, Ahead] = WeakKeyDictionary()
        """By those that stand: other micro-batches may compute before their next layer."""

    @property
    def standing(self) -> object | None:
        """What the rows that are computed stand for; see `runtime.Batch.standing`."""
        assert self.runtime.batch is not None
        return self.runtime.batch.standing if self.runtime.observe is None else None

    @contextmanager
    def record(self, layer: nn.Module, tokens: int, standing: object | None = None) -> Iterator[Record]:
        """That of a layer with so many tokens, to be gone through from its beginning to its end; standing: what it is for, if for nobody
        else."""
        rooms, records = self._kept(tokens, standing)
        known = records.layers.pop(layer, None)
        products = known.products if known is not None else [module for module in layer.modules() if isinstance(module, BoundLinear)]
        weights = [self._weight(product) for product in products]
        if known is None or known.weights != weights:
            known = Record(self._pool, rooms, products, weights)
            if self._stays(known):
                records.chains.clear()
        known.begin()
        yield known
        if known.is_whole:
            records.layers[layer] = known

    def _kept(self, tokens: int, standing: object | None) -> tuple[Rooms, Kept]:
        rooms, kept = self._sizes.pop(tokens) if tokens in self._sizes else (Rooms(), WeakKeyDictionary())
        while len(self._sizes) >= RECORDED_SIZES:
            del self._sizes[next(iter(self._sizes))]  # the one that was used longest ago
        self._sizes[tokens] = rooms, kept
        return rooms, kept.setdefault(standing or ANYONE, Kept({}, {}))

    def _weight(self, product: BoundLinear) -> tuple[object, ...]:
        """What tells where a product finds its weight, and how it is computed."""
        matrix = product.matrix
        return matrix.data.data_ptr(), matrix.format, self.runtime.kernel(matrix.format)

    def arrive(self, layer: nn.Module, hidden_states: torch.Tensor, embeddings: Embeddings, standing: object) -> torch.Tensor | None:
        """Called as a layer begins whose rows stand still: what it gives, if an earlier one has computed it, too, or computes it now with
        those that follow; None: it is to be computed."""
        left, ahead = self._left.pop(standing, None), self._ahead.get(standing)
        if ahead is not None and ahead.hidden is hidden_states and layer in ahead.layers:
            return hidden_states
        if left is not None and left.hidden is hidden_states and left.embeddings is embeddings:
            self._follows[layer] = left.layer
        _, kept = self._kept(hidden_states.shape[1], standing)
        if layer not in kept.chains:
            kept.chains[layer] = self._chain(layer, kept.layers)
        if (chain := kept.chains[layer]) is None:
            return None
        out = chain.do(self._pool, hidden_states, *embeddings)
        self._ahead[standing] = Ahead(out, frozenset(chain.layers[1:]))
        assert self.runtime.batch is not None
        self.runtime.batch.computed = chain.spans
        return out

    def leave(self, layer: nn.Module, hidden_states: torch.Tensor, embeddings: Embeddings, standing: object) -> None:
        """Called as such a layer has been computed."""
        self._left[standing] = Left(layer, hidden_states, embeddings)

    def _chain(self, first: nn.Module, records: dict[nn.Module, Record]) -> Chain | None:
        """The layer and those that follow, as far as they are recorded and their weights stay where they are."""
        next_of, layers = {before: layer for layer, before in self._follows.items()}, list[nn.Module]()
        layer: nn.Module | None = first
        while layer is not None and layer in records and self._stays(records[layer]):
            layers.append(layer)
            layer = next_of.get(layer)
        found = [records[one] for one in layers]
        return Chain(layers, found) if len(found) > 1 and all(record.takes_as(found[0]) for record in found) else None

    def _stays(self, record: Record) -> bool:
        return all(product.own is not None or self.runtime.weights.stays(product.name) for product in record.products)


class Left(NamedTuple):
    """What a layer has given."""

    layer: nn.Module
    hidden: torch.Tensor
    embeddings: Embeddings


class Ahead(NamedTuple):
    """What layers give that are still to be gone through."""

    hidden: torch.Tensor
    layers: frozenset[nn.Module]


class Kept(NamedTuple):
    """Records for a number of tokens, and of rows that stand still, or of anyone."""

    layers: dict[nn.Module, Record]
    chains: dict[nn.Module, Chain | None]
    """By the first layer; None: it is computed alone."""


class Record:
    """What was done in a layer: the memory that things were put into, and runs with their results, in order."""

    def __init__(self, pool: Pool, rooms: Rooms, products: list[BoundLinear], weights: list[tuple[object, ...]]) -> None:
        self._pool, self._rooms = pool, rooms
        self.products, self.weights = products, weights
        self._inputs: list[torch.Tensor] = []
        self._done: list[tuple[Any, Runs | None]] = []
        self._input = self._step = 0
        self._is_new = True

    @property
    def is_whole(self) -> bool:
        """Whether everything that was done can be done again."""
        return all(runs is not None for _, runs in self._done)

    def begin(self) -> None:
        """Go through it from the beginning."""
        self._is_new = not self._done
        self._input = self._step = 0
        if self._is_new:
            self._rooms.begin()

    def take(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """The same numbers, where they were put before."""
        if self._is_new:
            self._inputs += [self._rooms.take(one.shape, one.dtype) for one in given]
        found = self._inputs[self._input : self._input + len(given)]
        self._input += len(given)
        for room, one in zip(found, given, strict=True):
            room.copy_(one)
        return found

    def do(self, work: Callable[[], Result]) -> Result:
        """What `work` returns: runs of the pool's, done again where they are recorded. The next layer writes over it."""
        if self._is_new:
            self._done.append(self._pool.together(work, self._rooms))
            return self._done[-1][0]  # type: ignore[no-any-return]
        result, runs = self._done[self._step]
        self._step += 1
        assert runs is not None
        self._pool.again(runs)
        return result  # type: ignore[no-any-return]

    @property
    def whole(self) -> tuple[torch.Tensor, Runs]:
        """What it gives, and its only runs."""
        ((result, runs),) = self._done
        assert runs is not None
        return result, runs

    def takes_as(self, other: Record) -> bool:
        """Whether it is one piece of work that finds what it takes where another one does, and gives the first of it anew."""
        places = [[room.data_ptr() for room in one._inputs] for one in (self, other)]
        return len(self._done) == 1 and places[0] == places[1] and self._done[0][0].data_ptr() == places[0][0]


class Chain:
    """Layers that are done in one go."""

    def __init__(self, layers: Sequence[nn.Module], records: Sequence[Record]) -> None:
        self.layers, self._first = layers, records[0]
        self._result, _ = records[-1].whole
        self._runs, self._ends = Runs.in_a_row([record.whole[1] for record in records])

    def do(self, pool: Pool, *given: torch.Tensor) -> torch.Tensor:
        """What the last layer gives for what the first one is given."""
        self._first.begin()
        self._first.take(*given)
        pool.again(self._runs)
        return self._result.clone()

    @property
    def spans(self) -> list[tuple[float, float]]:
        """(begin_s, end_s) of each layer, the last time."""
        return self._runs.spans(self._ends)
