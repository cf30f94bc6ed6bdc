"""What the swapped parts of a model ask for while a micro-batch computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import greenlet

from lmoffload.kernels.pool import timed

if TYPE_CHECKING:
    import torch

    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.processor import Processor


class Weights(Protocol):
    """Where the matrices of the unit being computed are found."""

    def matrix(self, name: str) -> Matrix:
        """The stored matrix of this parameter name, resident or in the current ring buffer."""

    def stays(self, name: str) -> bool:
        """Whether this parameter's matrix lies in the same place all the time."""

    def expert(self, name: str, index: int) -> tuple[Matrix, ...]:
        """The stored matrix [N, K] of one expert, or those that its rows are split into."""

    def head_piece(self, unit: int) -> tuple[Matrix, int, int]:
        """(matrix, first_row, end_row) of the output head that this unit computes."""


class Watch(Protocol):
    """Hears how long products and attention took."""

    def product(self, kernel: str, matrix: Matrix, rows: int, seconds: float) -> None:
        """A product of `rows` rows of activations with a matrix."""

    def attention(self, layer: int, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Attention at a layer; see `Batch.spans`."""


class Unwatched:
    """Hears nothing."""

    def product(self, kernel: str, matrix: Matrix, rows: int, seconds: float) -> None: ...
    def attention(self, layer: int, spans: Sequence[tuple[int, int]], seconds: float) -> None: ...


class Batch(Protocol):
    """The micro-batch that computes now."""

    computed: list[tuple[float, float]]
    """(begin_s, end_s) of the layers, from the one that computes now on, that were computed in one go."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """(tokens attended to before, tokens with those of this forward) of each row; the same object all through a forward."""

    @property
    def standing(self) -> object | None:
        """Stays the same, and alive, while rows take one step after another and find everything where the step before did; None where that
        is not so."""

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Tokens [begin, end) of each row among the packed ones; what follows the last is padding."""

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
        """Attention at one layer: stores the new keys and values, then attends.

        query [T, heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim] -> [T, heads, value_dim].
        tell: hears the seconds that attending took.
        """


class Runtime:
    """State shared by every swapped module of one model. All of it is used from one thread, between switches of greenlets."""

    def __init__(self, weights: Weights, processor: Processor, head_units: tuple[int, ...], watch: Watch | None = None) -> None:
        self.weights = weights
        self.watch: Watch = watch or Unwatched()
        self.processor = processor
        self.head_units = head_units
        self.kernel: Callable[[str], str] = _no_kernel
        """Linear kernel of the current phase for a stored format."""
        self.batch: Batch | None = None
        """The micro-batch that computes now."""
        self.keep: Callable[[torch.Tensor], None] | None = None
        """Is shown what a forward goes on with as it reaches a unit, [1, T, hidden]; at the output head, what its input was taken from."""
        self.observe: Callable[[str, torch.Tensor], None] | None = None
        """Is shown what each matrix of the layers is multiplied with, fp32 [T, K], padding left out; None: nothing watches."""

    def product(self, rows: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """rows [M, K] contiguous -> [M, N] with the current phase's kernel, in the processor's dtype."""
        kernel = self.kernel(matrix.format)
        work, tell = partial(self.processor.product, rows, matrix, kernel, bias), partial(self.watch.product, kernel, matrix, rows.shape[0])
        return timed(self.processor.pool, work, tell, matrix.data.numel())

    def settle(self) -> None:
        """What was put off is done (`Pool.together`): what follows reads it otherwise than by kernels of ours."""
        if self.processor.pool is not None:
            self.processor.pool.settle()

    @staticmethod
    def reach(unit: int) -> None:
        """Hand control back to the scheduler at the start of a unit; returns when the unit is to be computed.

        Outside a scheduler's greenlet (a plain forward) it returns at once.
        """
        parent = greenlet.getcurrent().parent
        if parent is not None:
            parent.switch(unit)


def _no_kernel(_format: str) -> str:
    raise AssertionError("no phase has begun")
