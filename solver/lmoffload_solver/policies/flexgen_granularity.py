"""FlexGen's granularity: how its percentages of weights become whole tensors.

Source: FMInference/FlexLLMGen at 004ffef, flexllmgen/flex_opt.py. Each module (embedding, attention, MLP, head) is placed by itself: a
tensor goes where its middle falls when the module's elements are laid end to end, disk first, then host, then device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.value import Tier


def homes_of_sizes(sizes: Sequence[int], device_percent: float, host_percent: float) -> tuple[Tier, ...]:
    """The tier of each tensor of one module, given their elements in FlexGen's order.

    A tensor's middle, 100·(cumulative size − size/2) / total, lies below the disk's percentage, below disk and host, or else on the device.
    """
    disk_percent = 100 - device_percent - host_percent
    homes: list[Tier] = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        middle = (end - size / 2) / sum(sizes) * 100
        if middle < disk_percent:
            homes.append("disk")
        else:
            homes.append("host" if middle < disk_percent + host_percent else "device")
    return tuple(homes)


def tensor_homes(model: ModelShape, device_percent: float, host_percent: float) -> dict[str, Tier]:
    """Every tensor's tier, by name. FlexGen holds a tied table twice, as embedding and as head; the former counts here."""
    homes: dict[str, Tier] = {}
    for module in modules_of(model):
        sizes = [math.prod(tensor.shape) for tensor in module]
        homes |= zip((tensor.name for tensor in module), homes_of_sizes(sizes, device_percent, host_percent), strict=True)
    return homes


def achieved_percent(model: ModelShape, device_percent: float, host_percent: float) -> dict[Tier, float]:
    """What the requested percentages come to, of the elements of the decoder layers."""
    homes = tensor_homes(model, device_percent, host_percent)
    tensors = [tensor for layer in model.by_layer for tensor in layer]
    total = sum(math.prod(tensor.shape) for tensor in tensors)
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    return {tier: 100 * sum(math.prod(t.shape) for t in tensors if homes[t.name] == tier) / total for tier in tiers}


def modules_of(model: ModelShape) -> list[list[TensorShape]]:
    """The tensors of each module in FlexGen's order: embedding; attention and MLP of each layer; head with the last norm.

    A layer's norm belongs to the module that is listed before it, as in OPT, the one family that FlexGen has.
    """
    modules = [[t for t in model.tensors if t.layer is None and t.tensor_class == "embedding"]]
    for layer in model.by_layer:
        attention: list[TensorShape] = []
        mlp: list[TensorShape] = []
        current = attention
        for tensor in layer:
            if tensor.tensor_class != "norm":
                current = attention if tensor.tensor_class == "attention" else mlp
            current.append(tensor)
        modules += [attention, mlp]
    modules.append([t for t in model.tensors if t.layer is None and t.tensor_class != "embedding"])
    return [module for module in modules if module]
