"""Fixed costs: what the unmodified forward costs beside its products and its attention, on a real tiny model in the real engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmoffload.profiler.curves import least_squares
from lmoffload.profiler.samples import repeat, summarize
from lmoffload.profiler.tiny import LINEARS_PER_LAYER, decode_times, write_tiny_checkpoint
from lmoffload_solver import counting
from lmoffload_solver.machine import Overheads

if TYPE_CHECKING:
    from lmoffload.kernels.pool import Pool

FEW_ROWS, MANY_ROWS = 4, 32
ENGINE_RUNS = 2
SMALL_KERNEL = "fused_dot"
"""The kernel that plans choose where few rows make fixed costs count."""
ELEMENTWISE_TOKENS = (64, 128, 256, 512)
HIDDEN, INTERMEDIATE = 576, 1536


def measure_overheads(
    pool: Pool, budget_s: float, random_read_s: float, *, quick: bool, tell: Callable[[str], None] = lambda what: None
) -> Overheads:
    """Every fixed cost; `pool` has the threads of a run."""
    from lmoffload.checkpoint import open_checkpoint

    tell("a linear layer's hand-over")
    call_s = linear_call_s(pool, budget_s * 0.1)
    tell("norms, rotary embedding, activation and residuals")
    rate = elementwise_bytes_per_s(budget_s * 0.3)
    tell("a tiny model's layers and steps")
    steps = 24 if quick else 96
    with tempfile.TemporaryDirectory(prefix="lmoffload-profile-") as folder:
        checkpoint = open_checkpoint(write_tiny_checkpoint(Path(folder)))
        times = {
            rows: [decode_times(checkpoint, rows=rows, steps=steps, threads=pool.threads, kernel=SMALL_KERNEL) for _ in range(ENGINE_RUNS)]
            for rows in (FEW_ROWS, MANY_ROWS)
        }
    few, many = (summarize([time.rest_s for time in times[rows]]).median_s for rows in (FEW_ROWS, MANY_ROWS))
    row_s = max(0.0, (many - few) / (MANY_ROWS - FEW_ROWS))
    layer_s = summarize([time.layer_s for time in times[FEW_ROWS]]).median_s
    return Overheads(
        layer_s=max(0.0, layer_s - LINEARS_PER_LAYER * call_s),
        step_s=max(0.0, few - FEW_ROWS * row_s - call_s),
        row_s=row_s,
        linear_call_s=call_s,
        elementwise_bytes_per_s=rate,
        random_read_s=random_read_s,
    )


def linear_call_s(pool: Pool, budget_s: float) -> float:
    """Seconds of a linear layer so small that handing it to the pool is all that it costs."""
    import torch

    from lmoffload.kernels.linear import linear
    from lmoffload.kernels.matrix import Matrix

    weight = torch.ones(64 * pool.threads, 16).view(torch.uint8).view(-1)
    matrix, x = Matrix(weight, "fp32", 64 * pool.threads, 16), torch.ones(4, 16)
    return repeat(partial(linear, x, matrix, SMALL_KERNEL, pool), budget_s, at_least=20, at_most=5000).median_s


def elementwise_bytes_per_s(budget_s: float) -> float:
    """Rate of `counting.elementwise_bytes`: the slope of time over tokens of an unmodified forward without products and attention."""
    import torch
    from transformers import LlamaConfig

    layers = 2
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    model = _without_products(config)
    counted = _elementwise_bytes(config)
    amounts, times_s = [], []
    with torch.no_grad():
        for tokens in ELEMENTWISE_TOKENS:
            hidden, positions = torch.randn(1, tokens, HIDDEN), torch.arange(tokens).unsqueeze(0)
            forward = partial(model.model, inputs_embeds=hidden, position_ids=positions, use_cache=False)
            times_s.append(repeat(forward, budget_s / len(ELEMENTWISE_TOKENS)).median_s)
            amounts.append(float(counted * tokens * layers))
    _, seconds_per_byte, _ = least_squares(amounts, times_s)
    # Without a slope (a machine too unsteady to show one) the whole time of the longest is a safe rate.
    return 1 / seconds_per_byte if seconds_per_byte > 0 else amounts[-1] / times_s[-1]


def _elementwise_bytes(config: Any) -> int:
    """Bytes of one layer and token, as the solver counts them."""
    from lmoffload_solver.model import LayerShape, ModelShape

    layer = LayerShape(num_heads=9, num_kv_heads=3, key_dim=config.head_dim, value_dim=config.head_dim)
    shape = ModelShape(
        name="elementwise",
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        vocab_size=16,
        layers=(layer,),
        tensors=(),
    )
    return counting.elementwise_bytes(shape, 0, 1)


def _without_products(config: Any) -> Any:
    """The unmodified model with linear layers and attention that cost nothing: they hand out memory that is there already."""
    import torch
    from torch import nn

    from lmoffload.modeling.attention import RUNTIME_ATTRIBUTE
    from lmoffload.modeling.build import build_model

    class Free(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.out = torch.randn(1, ELEMENTWISE_TOKENS[-1], width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out[:, : x.shape[1]]

    class FreeBatch:
        def attend(self, _layer: int, query: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
            return query

    class FreeRuntime:
        batch = FreeBatch()

    model = build_model(config)
    for name, module in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear):
            setattr(model.get_submodule(owner), leaf, Free(module.out_features))
        elif hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
            setattr(module, RUNTIME_ATTRIBUTE, FreeRuntime())
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.ones(parameter.shape), requires_grad=False))
    return model
