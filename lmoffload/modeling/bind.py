"""Swap a meta-device model's linear layers, vectors and layer boundaries for ones that we feed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lmoffload.kernels.attention import prefill_kernel
from lmoffload.kernels.matrix import Matrix
from lmoffload.modeling.attention import RUNTIME_ATTRIBUTE
from lmoffload.modeling.elementwise import bind_elementwise
from lmoffload.modeling.experts import BoundExperts
from lmoffload.modeling.linear import BoundHead, BoundLinear, BoundWeight
from lmoffload.modeling.recorder import Recorder
from lmoffload.modeling.rotary import bind_rotary
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.errors import StatedError
from lmoffload_solver.model import ModelShape, TensorShape

NAMES = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"})
"""Formats of tensors as they lie."""


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The model's list of decoder layers.

    Raises:
        StatedError: there is not exactly one list of that many layers with attention in them.
    """
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and _attentions(module[0])
    ]
    if len(lists) != 1:
        raise StatedError(f"{type(model).__name__} does not have one list of {num_layers} decoder layers, so it cannot be run yet.")
    return lists[0]


def bind(
    model: Any,
    shape: ModelShape,
    runtime: Runtime,
    vectors: Mapping[str, torch.Tensor],
    layer_units: Sequence[int | None],
    part_units: Mapping[str, int] = MappingProxyType({}),
    stops_in_layers: bool = False,
) -> None:
    """Bind `model` (on the meta device) to a runtime, once.

    Args:
        model: a transformers causal language model.
        shape: what the checkpoint holds; its matrices become `BoundLinear`s.
        runtime: what the swapped parts ask.
        vectors: every resident tensor that is not a linear layer's matrix, in the processor's dtype and on its device, by parameter name.
        layer_units: unit index at which each decoder layer begins; None: it is computed elsewhere, and lets hidden states pass.
        part_units: unit index that begins at the product of a matrix, by its name, where layers are cut.
        stops_in_layers: other micro-batches may compute while one is in the middle of a layer.

    Raises:
        StatedError: a parameter of the model is not fed by the checkpoint, or a tensor of the checkpoint feeds none.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None  # it matters to training alone, and torch wants it within the table, which is as long as a step's tokens
    fed: set[str] = set()
    names = {module: name for name, module in model.named_modules()}
    for tensor in shape.tensors:
        if tensor.is_matrix and tensor.name not in (shape.embedding.name, shape.head.name):
            _bind_matrix(model, tensor, runtime, vectors, part_units)
            fed |= {tensor.name, f"{tensor.name.removesuffix('.weight')}.bias"}
    fed |= _bind_small_linears(model, runtime, vectors, exclude=head)
    head_bias = vectors.get(f"{names[head]}.bias") if getattr(head, "bias", None) is not None else None
    _replace(model, names[head], BoundHead(shape.vocab_size, runtime, head_bias))
    fed |= {shape.head.name, shape.embedding.name, f"{names[head]}.bias"}
    embedding_name = f"{names[embedding]}.weight"
    for name, parameter in list(model.named_parameters()):
        if name == embedding_name:
            continue  # bound to the looked-up rows at every step
        value = vectors.get(name)
        if value is None:
            raise StatedError(f"The parameter {name} of {type(model).__name__} is fed by no tensor of the checkpoint.")
        if tuple(value.shape) != tuple(parameter.shape):
            raise StatedError(f"The tensor {name} has shape {list(value.shape)}, but the model needs {list(parameter.shape)}.")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
        fed.add(name)
    unused = [name for name in vectors if name not in fed]
    if unused:
        raise StatedError(f"Nothing in {type(model).__name__} consumes the tensor {unused[0]} of the checkpoint.")
    _move_buffers(model, runtime.processor.device)
    bind_rotary(model, runtime)
    if runtime.processor.pool is not None:  # a device has torch's operators
        bind_elementwise(model, runtime.processor.pool, None if stops_in_layers else Recorder(runtime, runtime.processor.pool))
    model.base_model.register_forward_hook(partial(_keep_last, runtime))
    _bind_layers(decoder_layers(model, shape.num_layers), runtime, layer_units)
    prefill_kernel()  # compiled now: the first prefill is measured, and half a second is no part of its prediction


def lookup(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Bind the embedding table to `rows` [T, hidden] and return the ids [1, T] that look them up in order.

    So the model's own embedding module runs, with whatever it does beside the lookup, over a table of just the rows needed.
    """
    model.get_input_embeddings().weight = nn.Parameter(rows, requires_grad=False)
    return torch.arange(rows.shape[0], device=rows.device).unsqueeze(0)


def _bind_matrix(
    model: Any, tensor: TensorShape, runtime: Runtime, vectors: Mapping[str, torch.Tensor], part_units: Mapping[str, int]
) -> None:
    """Put a module, or a weight, of ours where the model has that of a matrix: a linear layer, experts, or a router."""
    owner, _, leaf = tensor.name.rpartition(".")
    module = _submodule(model, owner)
    if tensor.tensor_class == "experts":
        if not isinstance(module, BoundExperts):
            _replace(model, owner, BoundExperts(owner, module, runtime, part_units))
        return
    product = BoundLinear(tensor.name, runtime, None, unit=part_units.get(tensor.name))
    if isinstance(module, nn.Linear):
        product.bias = vectors.get(f"{owner}.bias") if module.bias is not None else None
        _replace(model, owner, product)
    elif leaf in dict(module.named_parameters(recurse=False)):
        del module._parameters[leaf]
        setattr(module, leaf, BoundWeight(product))
    else:
        raise StatedError(f"The tensor {tensor.name} is a matrix but {owner or 'its owner'} has no such weight.")


def _bind_small_linears(model: nn.Module, runtime: Runtime, vectors: Mapping[str, torch.Tensor], exclude: nn.Module) -> set[str]:
    """Linear layers whose weight is among the resident tensors (OPT's projections) run through the same row-invariant products."""
    fed: set[str] = set()
    small = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not exclude]
    for name, module in small:
        weight = vectors.get(f"{name}.weight")
        if weight is None:
            continue  # told as a parameter that nothing feeds
        own = Matrix(weight.contiguous().view(torch.uint8).reshape(-1), NAMES[weight.dtype], weight.shape[0], weight.shape[1])
        _replace(model, name, BoundLinear(f"{name}.weight", runtime, vectors.get(f"{name}.bias") if module.bias is not None else None, own))
        fed |= {f"{name}.weight", f"{name}.bias"}
    return fed


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _bind_layers(layers: nn.ModuleList, runtime: Runtime, layer_units: Sequence[int | None]) -> None:
    for layer, unit in zip(layers, layer_units, strict=True):
        layer.forward = _passing if unit is None else _switching(layer.forward, runtime, unit)
        for attention in _attentions(layer):
            setattr(attention, RUNTIME_ATTRIBUTE, runtime)


def _passing(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _switching(forward: Callable[..., Any], runtime: Runtime, unit: int) -> Callable[..., Any]:
    def reach_then_forward(*args: Any, **kwargs: Any) -> Any:
        if runtime.keep is not None:
            runtime.keep(args[0] if args else kwargs["hidden_states"])
        runtime.reach(unit)
        return forward(*args, **kwargs)

    return reach_then_forward


def _keep_last(runtime: Runtime, _module: nn.Module, _given: Any, output: Any) -> None:
    if runtime.keep is not None:
        runtime.keep(output[0])


def _attentions(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise StatedError(f"The checkpoint's tensor {name}.weight has no place in {type(model).__name__}.") from error


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)
