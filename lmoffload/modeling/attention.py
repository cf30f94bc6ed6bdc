"""Our attention in transformers' registry: packed sequences, no masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

RUNTIME_ATTRIBUTE = "lmoffload_runtime"
"""Attention modules carry their model's `Runtime` under this name (set by `bind`)."""


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one packed micro-batch, called by the unmodified forward.

    query [1, heads, T, key_dim], key [1, kv_heads, T, key_dim], value [1, kv_heads, T, value_dim]; the T tokens are those of all rows,
    one after another. Returns [1, T, heads, value_dim]. The sliding window is that of the layer's `LayerShape`, known to the cache.
    """
    runtime = getattr(module, RUNTIME_ATTRIBUTE)
    batch = runtime.batch
    assert batch is not None and attention_mask is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def tell(seconds: float) -> None:
        runtime.watch.attention(module.layer_idx, runtime.batch.spans, seconds)

    out = batch.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scale,
        softcap=softcap,
        sinks=s_aux,
        tell=tell,
    )
    return out.unsqueeze(0), None
