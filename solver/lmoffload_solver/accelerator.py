"""Accelerator and rates: what a profile knows of a processor with memory of its own, and of quantizing and attending on any processor.

Every number names its source in the profile; one that nobody measured or published is marked as an estimate.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmoffload_solver.value import Tier, Value

Way = Literal["eager", "fused"]
"""Eager: operator by operator, every intermediate written to memory. Fused: one kernel."""


class RateCurve(Value):
    """FLOP/s of 16-bit matrix products against M, the rows of the product, where memory does not bind."""

    rows: tuple[float, ...] = Field(min_length=1)
    flops_per_s: tuple[float, ...] = Field(min_length=1)


class Accelerator(Value):
    """A processor whose memory is the compute tier "device"."""

    name: str
    memory_bytes: int = Field(gt=0)
    reserved_bytes: int = Field(ge=0)
    """Taken by its driver, context and library workspaces before anything is allocated."""
    memory_bytes_per_s: float = Field(gt=0)
    """Reading, as achieved."""
    launch_s: float = Field(ge=0)
    """A short kernel on the device, its launch queued ahead."""
    products: RateCurve
    fused_products_share: float = Field(gt=0, le=1)
    """Rate of a product that dequantizes its weights in its inner loop, as a share of the 16-bit one."""
    count: int = Field(default=1, gt=0)
    """So many of them, alike, each behind a link of its own."""


class EmulatedDevice(Value):
    """An accelerator that is not there: an arena in host memory behind copy threads held to a rate, and a compute thread that runs the
    host's kernels on the host's cores."""

    memory_bytes: int = Field(gt=0)
    bytes_per_s: float = Field(gt=0)
    """Of each direction."""
    count: int = Field(default=1, gt=0)
    """So many of them, alike, each with a memory and a link of its own; they share the host's cores."""

    @property
    def name(self) -> str:
        return "emulated"


class Rate(Value):
    """How fast one processor does one kind of work, in one way.

    Units per second: attention_prefill FLOPs; attention_decode bytes of 16-bit keys and values; quantize and dequantize elements.
    """

    work: Literal["attention_prefill", "attention_decode", "quantize", "dequantize"]
    tier: Tier
    way: Way
    per_s: float = Field(gt=0)
    format: str | None = None
    """Of what is quantized or dequantized; None: of any."""


class Source(Value):
    """Where a number of the profile comes from."""

    field: str
    """Path of the number in this document."""
    text: str
    estimate: bool = False
