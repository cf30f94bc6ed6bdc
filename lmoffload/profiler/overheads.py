"""Fixed costs: what the forward costs beside its products and its attention, on a real tiny model in the real engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

from lmoffload.profiler.curves import least_squares
from lmoffload.profiler.samples import repeat, summarize
from lmoffload.profiler.tiny import LINEARS_PER_LAYER, StepTime, decode_times, device_layer_s, write_tiny_checkpoint
from lmoffload_solver import counting
from lmoffload_solver.machine import Overheads

if TYPE_CHECKING:
    from lmoffload.checkpoint import Checkpoint
    from lmoffload.kernels.pool import Pool
    from lmoffload.kernels.runs import Rooms

FEW_ROWS, MANY_ROWS = 4, 32
ENGINE_RUNS = 2
LEAST_CALLS = 20
PAUSE_S = 150e-6
"""The caller's own work between two products of a small layer."""
SMALL_KERNEL = "fused_dot"
"""The kernel that plans choose where few rows make fixed costs count."""
ELEMENTWISE_TOKENS = (64, 128, 256, 512)
HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS = 576, 1536, 9, 3
WIDE = (2048, 5632, 32, 4)
"""The same of a layer whose tensors soon leave the caches."""


def measure_overheads(
    pools: Sequence[Pool], budget_s: float, random_read_s: float, *, quick: bool, tell: Callable[[str], None] = lambda what: None
) -> Overheads:
    """Every fixed cost, from a small real model in the real engine: what its layers and steps take beside their products.

    A layer's rest with one thread is its fixed cost and seven calls; what the rest grows by with more threads is their waking and sharing,
    laid on the calls.
    """
    from lmoffload.checkpoint import open_checkpoint
    from lmoffload.profiler.copies import handover_s, waking

    tell("norms, rotary embedding, activation and residuals")
    rate = elementwise_bytes_per_s(pools[-1], budget_s * 0.2)
    slower = elementwise_slower(pools[-1], rate, budget_s * 0.1)
    tell("a small model's layers and steps")
    steps = 24 if quick else 96
    with tempfile.TemporaryDirectory(prefix="lmoffload-profile-") as folder:
        checkpoint = open_checkpoint(write_tiny_checkpoint(Path(folder), HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS))
        few = {pool.threads: _times(checkpoint, FEW_ROWS, steps, pool.threads) for pool in pools}
        many = _times(checkpoint, MANY_ROWS, steps, pools[0].threads)
        by_python = _times(checkpoint, FEW_ROWS, steps, pools[0].threads, "matrix")
        on_device = device_layer_s(checkpoint, rows=FEW_ROWS, steps=steps, threads=pools[-1].threads, kernel=SMALL_KERNEL)
    tell("a layer's products alone")
    rests = {pool.threads: few[pool.threads].layer_s - _products_s(pool, budget_s * 0.2 / len(pools)) for pool in pools}
    call_s = product_s(pools[0], 16, 16, budget_s * 0.05, PAUSE_S)
    alone, least = rests[pools[0].threads], few[pools[0].threads].rest_s
    row_s = max(0.0, (many.rest_s - least) / (MANY_ROWS - FEW_ROWS))
    return Overheads(
        layer_s=max(0.0, alone - LINEARS_PER_LAYER * call_s),
        python_layer_s=max(0.0, by_python.layer_s - few[pools[0].threads].layer_s),
        device_layer_s=max(0.0, on_device - few[pools[-1].threads].layer_s),
        step_s=max(0.0, least - FEW_ROWS * row_s - call_s),
        row_s=row_s,
        linear_call_s={threads: call_s + max(0.0, rest - alone) / LINEARS_PER_LAYER for threads, rest in rests.items()},
        elementwise_bytes_per_s=rate,
        elementwise_slower=slower,
        random_read_s=random_read_s,
        handover_s=handover_s(),
        waking=waking(pools[-1]),
    )


def _times(checkpoint: Checkpoint, rows: int, steps: int, threads: int, stream: Literal["layer", "matrix"] = "layer") -> StepTime:
    """Medians over a few runs of the engine."""
    times = partial(decode_times, checkpoint, rows=rows, steps=steps, threads=threads, kernel=SMALL_KERNEL, stream=stream)
    runs = [times() for _ in range(ENGINE_RUNS)]
    return StepTime(summarize([run.layer_s for run in runs]).median_s, summarize([run.rest_s for run in runs]).median_s)


def _products_s(pool: Pool, budget_s: float) -> float:
    """Seconds of the products of one layer of the small model, one after another without a pause, their calls left out."""
    key = HIDDEN * NUM_KV_HEADS // NUM_HEADS
    shapes = {(HIDDEN, HIDDEN): 2, (key, HIDDEN): 2, (INTERMEDIATE, HIDDEN): 2, (HIDDEN, INTERMEDIATE): 1}
    share_s = budget_s / (len(shapes) + 1)
    call_s = product_s(pool, 16, 16, share_s, 0.0)
    return sum(count * max(0.0, product_s(pool, n, k, share_s, 0.0) - call_s) for (n, k), count in shapes.items())


def run_s(pool: Pool, rooms: Rooms, action: Callable[[], object]) -> float:
    """Seconds that the pool's runs of `action` take, as the engine has few tokens computed: Python, which says what to run, left out."""
    found: list[float] = []
    rooms.begin()
    pool.together(lambda: pool.timed(action, found.append), rooms)
    return found[0]


def product_s(
    pool: Pool, n: int, k: int, budget_s: float, pause_s: float, clock: Callable[[Callable[[], object]], float] | None = None
) -> float:
    """Median seconds of a linear layer [n, k], fp32 weights in the cache, over four rows, each after a pause with the caller busy.

    clock: by default `run_s`.
    """
    import torch

    from lmoffload.kernels.linear import linear
    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.runs import Rooms

    matrix, x = Matrix(torch.ones(n, k).view(torch.uint8).view(-1), "fp32", n, k), torch.ones(4, k)
    call = partial(linear, x, matrix, SMALL_KERNEL, pool)
    clock = clock or partial(run_s, pool, Rooms())
    call()
    times_s: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(times_s) < LEAST_CALLS or time.perf_counter() < end_s:
        resume_s = time.perf_counter() + pause_s
        while time.perf_counter() < resume_s:
            pass
        times_s.append(clock(call))
    return summarize(times_s).median_s


def elementwise_bytes_per_s(pool: Pool, budget_s: float) -> float:
    """Rate of `counting.elementwise_bytes`: the slope of time over tokens of a forward, as the engine binds it, without products and
    attention."""
    forward = _Forward(pool, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS)
    amounts = [float(forward.layer_bytes * tokens) for tokens in ELEMENTWISE_TOKENS]
    times_s = [forward.layer_s(tokens, budget_s / len(ELEMENTWISE_TOKENS)) for tokens in ELEMENTWISE_TOKENS]
    _, seconds_per_byte, _ = least_squares(amounts, times_s)
    # Without a slope (a machine too unsteady to show one) the whole time of the longest is a safe rate.
    return 1 / seconds_per_byte if seconds_per_byte > 0 else amounts[-1] / times_s[-1]


def elementwise_slower(pool: Pool, rate: float, budget_s: float) -> tuple[tuple[float, float], ...]:
    """(bytes of a layer, how many times as long as `rate` says), of layers as wide as large models': from few tokens to more, what the time
    grows by."""
    forward = _Forward(pool, *WIDE)
    least, *more = (forward.layer_s(tokens, budget_s / (1 + len(ELEMENTWISE_TOKENS))) for tokens in (FEW_ROWS, *ELEMENTWISE_TOKENS))
    found = []
    for tokens, seconds in zip(ELEMENTWISE_TOKENS, more, strict=True):
        by_rate = forward.layer_bytes * (tokens - FEW_ROWS) / rate
        found.append((float(forward.layer_bytes * tokens), max(1.0, (seconds - least) / by_rate)))
    return tuple(found)


class _Forward:
    """The forward of a small Llama, as the engine binds it, without its products and its attention."""

    num_layers = 2

    def __init__(self, pool: Pool, hidden: int, intermediate: int, num_heads: int, num_kv_heads: int) -> None:
        from transformers import LlamaConfig

        self.hidden = hidden
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=self.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
        )
        self._model, self.layer_bytes = _without_products(config, pool), _elementwise_bytes(config)

    def layer_s(self, tokens: int, budget_s: float) -> float:
        """Median seconds of a layer."""
        import torch

        with torch.no_grad():
            hidden, positions = torch.randn(1, tokens, self.hidden), torch.arange(tokens).unsqueeze(0)
            forward = partial(self._model.model, inputs_embeds=hidden, position_ids=positions, use_cache=False)
            return repeat(forward, budget_s).median_s / self.num_layers


def _elementwise_bytes(config: Any) -> int:
    """Bytes of one layer and token, as the solver counts them."""
    from lmoffload_solver.model import LayerShape, ModelShape

    layer = LayerShape(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
    )
    shape = ModelShape(
        name="elementwise",
        model_type="llama",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=16,
        layers=(layer,),
        tensors=(),
    )
    return counting.elementwise_bytes(shape, 0, 1)


def _without_products(config: Any, pool: Pool) -> Any:
    """The model with linear layers and attention that cost nothing: they hand out memory that is there already."""
    import torch
    from torch import nn

    from lmoffload.modeling.attention import RUNTIME_ATTRIBUTE
    from lmoffload.modeling.build import build_model
    from lmoffload.modeling.elementwise import bind_elementwise
    from lmoffload.modeling.runtime import Runtime, Unwatched

    class Free(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.out = torch.full((1, ELEMENTWISE_TOKENS[-1], width), 9.0)  # written over again and again, it must not become subnormal

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out[:, : x.shape[1]]

    class FreeBatch:
        spans, standing = ((0, 1),), None

        def attend(self, _layer: int, query: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
            return query

    runtime = cast(Runtime, SimpleNamespace(batch=FreeBatch(), watch=Unwatched()))
    model = build_model(config)
    for name, module in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear):
            setattr(model.get_submodule(owner), leaf, Free(module.out_features))
        elif hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
            setattr(module, RUNTIME_ATTRIBUTE, runtime)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.ones(parameter.shape), requires_grad=False))
    bind_elementwise(model, pool)
    return model
