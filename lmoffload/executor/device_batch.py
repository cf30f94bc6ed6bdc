"""A micro-batch whose keys and values lie where a plan with a device has them, and which the host may attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmoffload.executor.kv_cache import LayerCache
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.resources import Accelerator
from lmoffload.executor.row import Row
from lmoffload.kernels.processor import HostProcessor, Processor
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan

AT_ATTENTION = -1
"""What a forward reaches that waits for the host's attention."""


@dataclass(slots=True)
class Handed:
    """Attention that the host is asked for: query, key and value of one token of each row."""

    layer: int
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: dict[str, Any]
    out: torch.Tensor | None = None
    """On the device."""
    seconds: float = 0.0
    """That attending took."""

    def took(self, seconds: float) -> None:
        self.seconds = seconds


class DeviceBatch(MicroBatch):
    """Rows that are computed together on a device."""

    def __init__(
        self,
        index: int,
        rows: Sequence[Row],
        shape: ModelShape,
        plan: Plan,
        processor: Processor,
        every_logit: bool = False,
        keep_logits: bool = False,
    ) -> None:
        super().__init__(index, rows, shape, plan, processor, every_logit, keep_logits)
        self._on_disk = frozenset(range(shape.num_layers))
        self.hands_over: int | None = None
        """Layer whose attention is handed to the host, where it is the one computed now."""
        self._handed: Handed | None = None

    def layer_cache(self, layer: int) -> LayerCache:
        """Keys and values of a layer, where they were placed last."""
        assert self.cache is not None
        return self.cache.layers[layer]

    def place(self, layer: int, cache: LayerCache) -> None:
        """Let the keys and values of a layer lie elsewhere."""
        assert self.cache is not None
        self.cache.layers[layer] = cache

    @property
    def positions(self) -> list[int]:
        """Of the newest token of each active row."""
        return [len(row.tokens) - 1 for row in self.rows if row.active]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        tell: Callable[[float], None],
    ) -> torch.Tensor:
        """See `modeling.runtime.Batch`; the forward waits here while the host attends."""
        options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
        if layer != self.hands_over:
            return super().attend(layer, query, key, value, **options, tell=tell)
        count = len(self.spans)
        given = (query[:count].contiguous(), key[:count].contiguous(), value[:count].contiguous())
        self._handed = handed = Handed(layer, given, options)
        Runtime.reach(AT_ATTENTION)
        assert handed.out is not None, "taken up before the host had attended"
        self._handed = None
        tell(handed.seconds)
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        out[:count] = handed.out
        return out

    def attend_on_host(self, host: HostProcessor, accelerator: Accelerator) -> None:
        """Do what `attend` handed over: query, key and value go down, the output goes up."""
        handed = self._handed
        assert handed is not None
        down = [torch.empty(given.shape, dtype=given.dtype) for given in handed.given]
        for target, given in zip(down, handed.given, strict=True):
            accelerator.to_host(_bytes(target), _bytes(given))
        query, key, value = (given.to(host.dtype) for given in down)
        own, self._processor = self._processor, host
        try:
            attended = super().attend(handed.layer, query, key, value, **handed.options, tell=handed.took)
        finally:
            self._processor = own
        source = attended.to(own.dtype).contiguous()
        out = torch.empty_like(source, device=own.device)
        accelerator.to_device(_bytes(out), _bytes(source))
        accelerator.keep_for(out, accelerator.compute)
        handed.out = out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).reshape(-1)
