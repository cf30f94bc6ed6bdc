"""A layer's experts, whose weights come from the runtime: transformers' experts modules, token by token the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.errors import StatedError

UP, DOWN = "gate_up_proj", "down_proj"
"""Parameters of an experts module of transformers: gate and up in one [E, 2·I, H], and down [E, H, I]."""


class BoundExperts(nn.Module):
    """Experts whose matrices lie in resident slabs or in the current ring buffer.

    All experts' activations are made before the first output, so that micro-batches can switch between the two where units do. Experts
    that no token of the micro-batch has chosen are not touched.

    Args:
        name: of the module in its model.
        module: the module of transformers; it gates.
        units: unit that begins at the product of a parameter, by its full name, where layers are cut.

    Raises:
        StatedError: the module computes something else than gated experts without biases.
    """

    def __init__(self, name: str, module: Any, runtime: Runtime, units: Mapping[str, int]) -> None:
        super().__init__()
        if not module.has_gate or module.has_bias or module.is_transposed or module.has_post_expert_norm:
            raise StatedError(f"The experts {name} of {type(module).__name__} are not plain gated ones, so they cannot be run yet.")
        self.up, self.down = f"{name}.{UP}", f"{name}.{DOWN}"
        self.num_experts = int(module.num_experts)
        self.gate = module._apply_gate
        self.runtime = runtime
        self.units = {part: units.get(part) for part in (self.up, self.down)}

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states fp32 [T, H], top_k_index int64 [T, k], top_k_weights fp32 [T, k] -> fp32 [T, H].

        As in transformers' eager forward, a token's outputs are added in the order of its experts. Padding is left out.
        """
        assert self.runtime.batch is not None
        num_tokens = self.runtime.batch.segments[-1][1]
        routes = _routes(top_k_index[:num_tokens], self.num_experts)
        self._reach(self.up)
        activations = [self.gate(self._product(self.up, expert, hidden_states[tokens])) for expert, tokens, _ in routes]
        self._reach(self.down)
        out = torch.zeros_like(hidden_states)
        for (expert, tokens, ranks), activation in zip(routes, activations, strict=True):
            rows = self._product(self.down, expert, activation)
            out.index_add_(0, tokens, rows.mul_(top_k_weights[tokens, ranks, None].to(rows.dtype)))
        return out

    def _reach(self, part: str) -> None:
        unit = self.units[part]
        if unit is not None:
            self.runtime.reach(unit)

    def _product(self, part: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, K] fp32 -> [R, N] with one expert's matrix, which may be stored in several."""
        if self.runtime.observe is not None:
            self.runtime.observe(part, rows)
        matrices = self.runtime.weights.expert(part, expert)
        parts = [self.runtime.product(rows, matrix) for matrix in matrices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _routes(top_k_index: torch.Tensor, num_experts: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, its tokens, their ranks) for every chosen expert, ascending; top_k_index: int64 [T, k]."""
    order = torch.argsort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(top_k_index.reshape(-1), minlength=num_experts).tolist()
    chosen = torch.split(order, counts)
    return [(expert, places // top_k_index.shape[1], places % top_k_index.shape[1]) for expert, places in enumerate(chosen) if len(places)]
