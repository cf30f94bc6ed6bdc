"""What transformers' models compute between their products, computed by kernels of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lmoffload.kernels.elementwise import add, elementwise_kernels, rms_norm, rotate, silu_gate
from lmoffload.kernels.pool import Pool
from lmoffload.modeling.attention import packed_attention

Forward = Callable[..., Any]

FEW_TOKENS = 64
"""Tokens up to which a layer is computed in few pieces: then its handing over counts, and what it keeps meanwhile is small."""


def bind_elementwise(model: nn.Module, pool: Pool, *, layers_are_whole: bool) -> None:
    """Have every module that computes what one of Llama's does compute it by kernels of ours.

    Transformers repeats the code of these modules in the files of most families: the code that runs decides, not a class's name.

    Args:
        layers_are_whole: nobody else computes between two products of a layer; few tokens then go through it with as few stops as possible
            (`Pool.together`).
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
            module.forward = _summed(module, pool, bound if layers_are_whole else set())
        elif _computes_as(module, llama.LlamaAttention) and _code(_forward(module).__globals__[rotary.__name__]) == _code(rotary):
            module.forward = _attended(module, pool)
        else:
            continue
        bound.add(module)
    elementwise_kernels()  # compiled now, as attention is


def _computes_as(module: nn.Module, known: type[nn.Module]) -> bool:
    """Whether a module's forward is the same code as that of a known class."""
    return _code(type(module).forward) == _code(known.forward)


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
        gate = module.gate_proj(x)
        return module.down_proj(silu_gate(gate, module.up_proj(x), pool))

    return forward


def _attended(module: Any, pool: Pool) -> Forward:
    def forward(hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any) -> Any:
        shape = (hidden_states.shape[1], -1, module.head_dim)
        query, key, value = (project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))
        cosines, sines = (part[0] for part in position_embeddings)
        rotate((query, key), cosines, sines, pool)
        pool.settle()
        query, key, value = (heads.unsqueeze(0).transpose(1, 2) for heads in (query, key, value))
        out, weights = packed_attention(module, query, key, value, None, scaling=module.scaling)
        return module.o_proj(out.reshape(1, shape[0], -1)), weights

    return forward


def _summed(module: Any, pool: Pool, ours: Set[nn.Module]) -> Forward:
    """ours: the modules whose forwards write with kernels of ours what kernels of ours read."""

    def forward(hidden_states: torch.Tensor, **options: Any) -> Any:
        few = hidden_states.shape[1] <= FEW_TOKENS and {module.input_layernorm, module.post_attention_layernorm} <= ours
        with pool.together() if few and module.self_attn in ours else nullcontext():
            attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **options)
            with pool.together() if few and module.mlp in ours else nullcontext():
                hidden_states = add(attended, hidden_states, pool)
                normed = module.post_attention_layernorm(hidden_states)
                if module.mlp not in ours:
                    pool.settle()
                return add(module.mlp(normed), hidden_states, pool)

    return forward
