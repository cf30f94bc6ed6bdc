"""Linear layers that take their weight from the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lmoffload.kernels.matrix import Matrix
from lmoffload.modeling.runtime import Runtime


class BoundLinear(nn.Module):
    """A linear layer whose weight lies in a resident slab or in the current ring buffer, or is `own`: small and always there.

    Where a unit begins with this product, micro-batches switch before it.
    """

    def __init__(
        self, name: str, runtime: Runtime, bias: torch.Tensor | None, own: Matrix | None = None, unit: int | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.runtime = runtime
        self.bias = bias
        self.own = own
        self.unit = unit

    @property
    def matrix(self) -> Matrix:
        """The weight as it lies now."""
        return self.runtime.weights.matrix(self.name) if self.own is None else self.own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N], in the processor's dtype."""
        if self.unit is not None:
            self.runtime.reach(self.unit)
        matrix = self.matrix
        rows, batch = x.reshape(-1, x.shape[-1]), self.runtime.batch
        real = rows if batch is None else rows[: batch.segments[-1][1]]
        if self.runtime.observe is not None and batch is not None:
            self.runtime.settle()
            self.runtime.observe(self.name, real)
        out = self.runtime.product(real, matrix, self.bias)
        if real.shape[0] < rows.shape[0]:  # padding costs a copy, and no product: torch's elementwise loops need it, nobody reads it
            self.runtime.settle()
            out = torch.nn.functional.pad(out, (0, 0, 0, rows.shape[0] - real.shape[0]))
        return out.view(*x.shape[:-1], matrix.n)


class BoundWeight:
    """Stands for a matrix that a forward of transformers gives to `torch.nn.functional.linear` itself, as routers of experts do."""

    def __init__(self, product: BoundLinear) -> None:
        self.product = product

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        assert function is torch.nn.functional.linear and len(args) == 2 and not kwargs, "only a product without bias takes this weight"
        x, weight = args
        return weight.product(x)


class BoundHead(nn.Module):
    """The output head, computed in the pieces of its units, with a switch of micro-batch before each."""

    def __init__(self, vocab_size: int, runtime: Runtime, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.runtime = runtime
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, R, hidden] (the positions whose logits are asked for) -> [1, R, vocabulary]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty(rows.shape[0], self.vocab_size)
        for unit in self.runtime.head_units:
            self.runtime.reach(unit)
            matrix, first, end = self.runtime.weights.head_piece(unit)
            bias = None if self.bias is None else self.bias[first:end]
            if first == 0 and end == self.vocab_size:
                out = self.runtime.product(rows, matrix, bias)
            else:
                out[:, first:end] = self.runtime.product(rows, matrix, bias)
        return out.unsqueeze(0)
