"""How few tokens go through a layer, recorded once and done again without Python.

With one token a layer of a 1B model is computed in a millisecond, and Python, cold after the weights that went through the caches, takes
another to say what is to be computed: the same every time, but for what it is computed from. So what a layer runs is kept with the
memory that it reads and writes, and the next tokens are put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from lmoffload.kernels.pool import Pool
from lmoffload.kernels.runs import Rooms, Runs
from lmoffload.modeling.linear import BoundLinear
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.memory import RECORDED_SIZES

Result = TypeVar("Result")


class Recorder:
    """Keeps the records of a model's layers, which are computed one after another, each without a stop."""

    def __init__(self, runtime: Runtime, pool: Pool) -> None:
        self._runtime, self._pool = runtime, pool
        self._sizes: dict[int, tuple[Rooms, dict[nn.Module, Record]]] = {}

    @contextmanager
    def record(self, layer: nn.Module, tokens: int) -> Iterator[Record]:
        """That of a layer with so many tokens, to be gone through from its beginning to its end."""
        rooms, records = self._sizes.pop(tokens) if tokens in self._sizes else (Rooms(), {})
        while len(self._sizes) >= RECORDED_SIZES:
            del self._sizes[next(iter(self._sizes))]  # the one that was used longest ago
        self._sizes[tokens] = rooms, records
        known = records.pop(layer, None)
        products = known.products if known is not None else [module for module in layer.modules() if isinstance(module, BoundLinear)]
        weights = [self._weight(product) for product in products]
        if known is None or known.weights != weights:
            known = Record(self._pool, rooms, products, weights)
        known.begin()
        yield known
        if known.is_whole:
            records[layer] = known

    def _weight(self, product: BoundLinear) -> tuple[object, ...]:
        """What tells where a product finds its weight, and how it is computed."""
        matrix = product.matrix
        return matrix.data.data_ptr(), matrix.format, self._runtime.kernel(matrix.format)


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
