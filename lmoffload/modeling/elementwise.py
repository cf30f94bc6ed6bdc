"""What transformers' models compute between their products, computed by kernels of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from lmoffload.kernels.elementwise import add, elementwise_kernels, rms_norm, rotate, silu_gate
from lmoffload.kernels.pool import Pool
from lmoffload.modeling.attention import packed_attention
from lmoffload.modeling.recorder import Recorder
from lmoffload_solver.counting import FEW_NUMBERS

Forward = Callable[..., Any]


def bind_elementwise(model: nn.Module, pool: Pool, recorder: Recorder | None = None) -> None:
    """Have every module that computes what one of Llama's does compute it by kernels of ours.

    Transformers repeats the code of these modules in the files of most families: the code that runs decides, not a class's name.

    Args:
        recorder: keeps how few tokens go through each layer, where nobody else computes between two products of a layer; None: nothing is
            kept.
    """
    from transformers.activations import SiLUActivation
    from transformers.models.llama import modeling_llama as llama

    rotary, bound = llama.apply_rotary_pos_emb, set[nn.Module]()
    for module in model.modules():
        if _computes_as(module, llama.LlamaRMSNorm):
            module.forward = _normed(module, pool)
        elif _computes_as(module, llama.LlamaMLP) and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
            module.forward = _gated(module, pool)
        elif _computes_as(module, llama.LlamaDecoderLayer):
            module.forward = _summed(module, pool, bound, recorder)
        elif _attends(module) and _code(_forward(module).__globals__[rotary.__name__]) == _code(rotary):
            module.forward = _attended(module, pool)
        else:
            continue
        bound.add(module)
    elementwise_kernels()  # compiled now, as attention is


def _computes_as(module: nn.Module, known: type[nn.Module]) -> bool:
    """Whether a module's forward is the same code as that of a known class."""
    return _code(type(module).forward) == _code(known.forward)


def _attends(module: nn.Module) -> bool:
    """Whether it attends as Llama's attention does, or as Qwen3's, which norms each head's queries and keys."""
    if not hasattr(module, "q_norm"):
        from transformers.models.llama.modeling_llama import LlamaAttention

        return _computes_as(module, LlamaAttention)
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    norms = module.get_submodule("q_norm"), module.get_submodule("k_norm")
    return _computes_as(module, qwen3.Qwen3Attention) and all(_computes_as(norm, qwen3.Qwen3RMSNorm) for norm in norms)


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _code(function: Any) -> tuple[Any, ...]:
    """What tells one function's code from another's, decorators left out: of a function that is not Python, itself."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (function,) if code is None else (code.co_code, code.co_names, code.co_consts, code.co_varnames)


def _normed(module: Any, pool: Pool) -> Forward:
    return lambda hidden_states: rms_norm(hidden_states, module.weight, module.variance_epsilon, pool)


def _gated(module: Any, pool: Pool) -> Forward:
    def forward(x: torch.Tensor) -> Any:
        gate, up = pool.beside([partial(project, x) for project in (module.gate_proj, module.up_proj)])
        return module.down_proj(silu_gate(gate, up, pool))

    return forward


def _attended(module: Any, pool: Pool) -> Forward:
    def forward(hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any) -> Any:
        query, key, value = _heads(module, hidden_states, *position_embeddings, pool)
        out, weights = packed_attention(module, query, key, value, None, scaling=module.scaling)
        return module.o_proj(out.reshape(1, hidden_states.shape[1], -1)), weights

    return forward


def _heads(module: Any, hidden_states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, pool: Pool) -> list[torch.Tensor]:
    """Queries, keys and values of an attention module, [1, heads, T, D], turned by their positions."""
    shape = (hidden_states.shape[1], -1, module.head_dim)
    projections = [partial(project, hidden_states) for project in (module.q_proj, module.k_proj, module.v_proj)]
    query, key, value = (projected.view(shape) for projected in pool.beside(projections))
    if hasattr(module, "q_norm"):
        query, key = pool.beside([partial(module.q_norm, query), partial(module.k_norm, key)])
    rotate((query, key), cosines[0], sines[0], pool)
    return [heads.unsqueeze(0).transpose(1, 2) for heads in (query, key, value)]


def _summed(module: Any, pool: Pool, ours: Set[nn.Module], recorder: Recorder | None) -> Forward:
    """ours: modules whose forwards run nothing but kernels of ours, products included."""
    attention = module.self_attn

    def finish(attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Written over hidden_states."""
        hidden_states = add(hidden_states, attended, pool)
        return add(hidden_states, module.mlp(module.post_attention_layernorm(hidden_states)), pool)

    def whole(hidden_states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        query, key, value = _heads(attention, module.input_layernorm(hidden_states), cosines, sines, pool)
        out, _ = packed_attention(attention, query, key, value, None, scaling=attention.scaling)
        return finish(attention.o_proj(out.reshape(1, out.shape[1], -1)), hidden_states)

    def forward(hidden_states: torch.Tensor, **options: Any) -> Any:
        tokens, few = hidden_states.shape[1], hidden_states.numel() <= FEW_NUMBERS and {module.post_attention_layernorm, module.mlp} <= ours
        if recorder is None or not few:
            attended, _ = attention(hidden_states=module.input_layernorm(hidden_states), **options)
            hidden_states = add(attended, hidden_states, pool)
            return add(module.mlp(module.post_attention_layernorm(hidden_states)), hidden_states, pool)
        if not {module.input_layernorm, attention} <= ours:
            attended, _ = attention(hidden_states=module.input_layernorm(hidden_states), **options)
            with recorder.record(module, tokens) as record:
                attended, hidden_states = record.take(attended, hidden_states)
                return record.do(lambda: finish(attended, hidden_states)).clone()
        embeddings = options["position_embeddings"]
        if (standing := recorder.standing) is not None:
            if (found := recorder.arrive(module, hidden_states, embeddings, standing)) is not None:
                return found
            with recorder.record(module, tokens, standing) as record:
                taken = record.take(hidden_states, *embeddings)
                found = record.do(lambda: whole(*taken)).clone()
            recorder.leave(module, found, embeddings, standing)
            return found
        with recorder.record(module, tokens) as record:
            hidden_states, cosines, sines = record.take(hidden_states, *embeddings)
            query, key, value = record.do(lambda: _heads(attention, module.input_layernorm(hidden_states), cosines, sines, pool))
            out, _ = packed_attention(attention, query, key, value, None, scaling=attention.scaling)
            (out,) = record.take(out)
            flat = out.view(1, out.shape[1], -1)
            return record.do(lambda: finish(attention.o_proj(flat), hidden_states)).clone()

    return forward
