"""Norms and gated activations of transformers' models, computed by kernels of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lmoffload.kernels.elementwise import elementwise_kernels, rms_norm, silu_gate
from lmoffload.modeling.runtime import Runtime


def bind_elementwise(model: nn.Module, runtime: Runtime) -> None:
    """Have every module that computes what Llama's norm or feed-forward does compute it by a kernel of ours.

    Transformers repeats the code of these modules in the files of most families: the code that runs decides, not a class's name.
    """
    from transformers.activations import SiLUActivation
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    for module in model.modules():
        if _computes_as(module, LlamaRMSNorm):
            module.forward = _normed(module, runtime)
        elif _computes_as(module, LlamaMLP) and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
            module.forward = _gated(module, runtime)
    elementwise_kernels()  # compiled now, as attention is


def _computes_as(module: nn.Module, known: type[nn.Module]) -> bool:
    """Whether a module's forward is the same code as that of a known class."""
    code, same = getattr(type(module).forward, "__code__", None), known.forward.__code__
    return code is not None and (code.co_code, code.co_names, code.co_consts) == (same.co_code, same.co_names, same.co_consts)


def _normed(module: Any, runtime: Runtime) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda hidden_states: rms_norm(hidden_states, module.weight, module.variance_epsilon, runtime.pool)


def _gated(module: Any, runtime: Runtime) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        gate = module.gate_proj(x)
        product: torch.Tensor = module.down_proj(silu_gate(gate, module.up_proj(x), runtime.pool))
        return product

    return forward
