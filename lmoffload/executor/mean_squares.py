"""Mean squares of what matrices are multiplied with."""

from __future__ import annotations

import torch


class MeanSquares:
    """Sums of squares, in double precision, as products come by."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._rows: dict[str, int] = {}

    def add(self, name: str, rows: torch.Tensor) -> None:
        """rows fp32 [T, K], multiplied with the matrix `name`."""
        total = rows.double().square().sum(0)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._rows[name] = self._rows.get(name, 0) + rows.shape[0]

    def means(self) -> dict[str, torch.Tensor]:
        """fp32 [K] by name, of every matrix that came by."""
        return {name: (total / max(1, self._rows[name])).float() for name, total in self._sums.items()}
