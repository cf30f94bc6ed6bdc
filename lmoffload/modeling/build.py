"""The transformers model of a configuration, on the meta device, with its small constant buffers real."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    from torch import nn

ATTENTION_NAME = "lmoffload"
"""Name of our attention in transformers' registry. No mask function is registered under it, so that transformers makes no mask:
lengths say everything that a mask would."""


def build_model(config: Any) -> nn.Module:
    """The causal language model of a transformers configuration, in evaluation mode, every parameter on the meta device.

    Raises:
        StatedError: transformers has no causal language model for the configuration, or it holds state that is not in a checkpoint
            and that its own initialisation does not fill.
    """
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM

    from lmoffload.modeling.attention import packed_attention

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    config._attn_implementation = ATTENTION_NAME
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a value of the configuration that transformers looks up late makes it raise
        reason = " ".join((repr(error) if isinstance(error, KeyError) else str(error)).split())
        raise StatedError(f"Transformers cannot build a language model of type {config.model_type!r}: {reason}") from error
    model.eval()
    model.requires_grad_(False)
    _fill_constant_buffers(model)
    return model  # type: ignore[no-any-return]


def _fill_constant_buffers(model: Any) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies, embedding scales) their values.

    Transformers' own `_init_weights` computes them, as it does in `from_pretrained`; here only for the modules that own one, and with
    every other tensor still on the meta device, where initialisation costs nothing.
    """
    import torch

    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not names:
            continue
        for name in names:
            poison = torch.full(module._buffers[name].shape, float("nan"), dtype=torch.float32)
            module._buffers[name] = poison.to(module._buffers[name].dtype)
        model._init_weights(module)
        for name in names:
            if module._buffers[name].is_floating_point() and module._buffers[name].isnan().any():
                raise StatedError(
                    f"The buffer {name} of {type(module).__name__} is in no checkpoint and transformers does not fill it: "
                    "this model family cannot be run yet."
                )
