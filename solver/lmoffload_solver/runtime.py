"""Runtime: the traits of a system that make the same policy slower or faster. lmoffload's own is the default value."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmoffload_solver.accelerator import Way
from lmoffload_solver.value import Value


class Runtime(Value):
    """How a system carries a policy out."""

    name: str = "lmoffload"
    overlap: Literal["queues", "barriers", "none"] = "queues"
    """queues: every resource has its own queue and waits for what it depends on alone. barriers: all wait for all after each module and
    micro-batch. none: one thing after another."""
    halves: bool = False
    """Attention and MLP are loaded and computed as modules of their own."""
    weights_page_locked: bool = True
    kv_page_locked: bool = True
    quantizing: Way = "fused"
    attending: Way = "fused"
    """On the device."""
    host_attending: Way = "fused"
    dequantizes_per: Literal["block", "micro_batch"] = "block"
    """Whether the widened copy of a layer serves all micro-batches of a block."""
    stages_disk: bool = False
    """What comes from disk is read and uploaded by one thread, one after the other."""
    disk_bytes_per_s: float | None = Field(default=None, gt=0)
    """Most that its way of reading files reaches on any disk; None: what the disk gives."""
    repeats_kv_heads: bool = False
    """Keys and values are repeated to the number of query heads before the host attends."""
    batch_overhead_s: float = Field(default=0.0, ge=0)
    """Interpreter's time per module and micro-batch that nothing hides."""


def own_runtime() -> Runtime:
    """lmoffload's traits."""
    return Runtime()
