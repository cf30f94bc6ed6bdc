"""Rotary embeddings whose frequencies follow a sequence's length: computed row by row, so that no row sees another's length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.errors import StatedError

BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Types of rotary scaling that transformers recomputes from the largest position of the batch."""


def bind_rotary(model: nn.Module, runtime: Runtime) -> None:
    """Make every rotary embedding that follows the length do so row by row.

    Raises:
        StatedError: such an embedding is kept per type of layer.
    """
    for module in list(model.modules()):
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and BY_LENGTH & set(kind.values()):
            raise StatedError("This model's rotary embeddings follow the sequence length and differ between layers: it cannot be run yet.")
        if isinstance(kind, str) and kind in BY_LENGTH:
            module.forward = _row_by_row(module, runtime)


def follows_length(config: Any) -> bool:
    """Whether a token's rotary embedding depends on how long its sequence is: then a prompt cannot be computed in chunks."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in BY_LENGTH


def switches_at(config: Any) -> int | None:
    """Length at which a sequence's rotary frequencies change for all its tokens (longrope), or None.

    Transformers drops the keys it has when a sequence grows beyond it; a sequence that would is refused here.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return None
    length = parameters.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return None if length is None else int(length)


def _row_by_row(module: Any, runtime: Runtime) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    whole = module.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert runtime.batch is not None
        bounds = list(runtime.batch.segments)
        end = bounds[-1][1]
        if end < position_ids.shape[1]:
            bounds.append((end, position_ids.shape[1]))
        parts = []
        for first, last in bounds:
            module.max_seq_len_cached = module.original_max_seq_len  # forget what an earlier row's length left behind
            module.inv_freq = module.original_inv_freq.clone()
            parts.append(whole(x[:, first:last], position_ids[:, first:last]))
        cosines, sines = zip(*parts, strict=True)
        return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)

    return forward
