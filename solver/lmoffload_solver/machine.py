"""MachineProfile: what a machine is, as measured. Curves are data; `costs.py` turns them into seconds.

Every measured series keeps its spread, (90th − 10th percentile) / median of its repetitions, and is marked `unsteady` when that exceeds
0.25
at any point: a plan made from such a curve says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from lmoffload_solver.accelerator import Accelerator, EmulatedDevice, Rate, Source
from lmoffload_solver.value import Tier, Value


class Fit(Value):
    """A law fitted to a curve: time = latency_s + amount / rate_per_s; kept only where it holds."""

    law: Literal["latency_plus_rate"] = "latency_plus_rate"
    latency_s: float = Field(ge=0)
    rate_per_s: float = Field(gt=0)
    residual: float = Field(ge=0)
    """Root mean square of (fitted − measured) / measured over the points."""


class Curve(Value):
    """A measured rate over an independent variable; `x` ascending, `y` the median rate at each `x`."""

    x: tuple[float, ...] = Field(min_length=1)
    y: tuple[float, ...] = Field(min_length=1)
    spread: tuple[float, ...] = Field(min_length=1)
    unsteady: bool = False
    fit: Fit | None = None

    @model_validator(mode="after")
    def _same_lengths(self) -> Curve:
        if not len(self.x) == len(self.y) == len(self.spread):
            raise ValueError("x, y and spread have different lengths")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("x does not ascend")
        if self.x[0] <= 0:
            raise ValueError("x is not positive")
        if any(rate <= 0 for rate in self.y):
            raise ValueError("a rate is not positive")
        return self


class TransferCurve(Value):
    """Bytes per second against request size (bytes), with `threads` requests in flight."""

    threads: int = Field(gt=0)
    bytes_per_s: Curve


class Disk(Value):
    """One file system as measured."""

    file_system: str
    """Mount point."""
    device: str
    read: tuple[TransferCurve, ...]
    write: tuple[TransferCurve, ...] = ()
    direct: bool
    """Reads bypass the page cache (O_DIRECT)."""
    cache_excluded: bool
    """Checked that a second reading of the same places is not faster than the device; False means unsure."""
    free_bytes: int = Field(ge=0)
    random_write_s: float | None = Field(default=None, ge=0)
    """A page written in place, alone; None where it was not measured."""


class Link(Value):
    """Host to accelerator, page-locked and pageable, each way and both at once. Empty on a machine without one."""

    near: Tier
    far: Tier
    direction: Literal["upload", "download", "both"]
    page_locked: bool
    bytes_per_s: Curve


class MemoryRate(Value):
    """Read bandwidth of a tier's memory with `threads` reading."""

    tier: Tier
    threads: int = Field(gt=0)
    bytes_per_s: float = Field(gt=0)
    spread: float = Field(ge=0)


class LinearCurve(Value):
    """FLOP/s (2·M·N·K per second) of a linear layer [N, K] against M rows, weights rotated beyond the last-level cache."""

    kernel: str
    """A key of `lmoffload.kernels.linear.KERNELS`."""
    format: str
    """Stored format of the weight."""
    threads: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    flops_per_s: Curve
    beyond_cache: bool = True
    """False where memory did not suffice to rotate the weights beyond the last-level cache: the small-M end may be too fast."""


class AttentionCurve(Value):
    """Attention of one layer over keys and values in host memory.

    phase "decode": stored KV bytes read per second against the context length (tokens), for a block of rows.
    phase "prefill": FLOP/s (4·heads·head_dim·s²/2 causal) against the prompt length s; over fp32, before anything is stored.
    """

    phase: Literal["prefill", "decode"]
    format: str
    threads: int = Field(gt=0)
    rate: Curve


class Overheads(Value):
    """Fixed costs of the unmodified forward, measured on a real tiny layer."""

    layer_s: float = Field(ge=0)
    """Per decoder layer and micro-batch, matrix products and attention excluded."""
    python_layer_s: float = Field(default=0.0, ge=0)
    """The same more where a layer's work is not recorded and done again, but said by Python each time: with more tokens, in layers that are
    cut at matrices, or of experts. 0 where it was not measured."""
    device_layer_s: float = Field(default=0.0, ge=0)
    """The same more on an emulated device, to which weights, keys and values come meanwhile: the threads that copy and this one's Python
    stand in each other's way. 0 where it was not measured."""
    step_s: float = Field(ge=0)
    """Per micro-batch and step, outside the layers (embedding lookup, norm, head's own overhead, sampling)."""
    row_s: float = Field(ge=0)
    """Per sequence and step: sampling, stop checks, bookkeeping."""
    linear_call_s: dict[int, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Handing one linear layer to the pool, by its number of threads: waking threads that slept since the layer before is part of it."""
    elementwise_bytes_per_s: float = Field(gt=0)
    """Rate at which `counting.elementwise_bytes` of a layer are worked off (norms, rotary embedding, activation, residuals)."""
    elementwise_slower: tuple[tuple[float, float], ...] = ()
    """(bytes of a layer's elementwise work, how many times as long they take as that rate says), ascending: tensors leave the caches.
    Empty where it was not measured."""
    random_read_s: float = Field(ge=0)
    """One direct 4 KiB read of a table row on disk."""
    handover_s: float | None = Field(default=None, ge=0)
    """Handing a task from one thread to another that waits for it; None where it was not measured."""
    waking: tuple[tuple[float, float], ...] = ()
    """(seconds for which nothing computed, seconds then lost until cores compute as fast as before), ascending: clocks and caches that were
    let go. Empty where it was not measured."""

    def elementwise_s(self, layer_bytes: Any) -> Any:
        """Seconds of one layer's elementwise work of so many bytes, a number or an array."""
        seconds = layer_bytes / self.elementwise_bytes_per_s
        if not self.elementwise_slower:
            return seconds
        sizes, factors = zip(*self.elementwise_slower, strict=True)
        return seconds * np.interp(layer_bytes, sizes, factors)

    def call_s(self, threads: int) -> float:
        """Handing one linear layer to a pool of `threads`: as measured with the nearest number, the larger of two equally near."""
        return self.linear_call_s[min(self.linear_call_s, key=lambda measured: (abs(measured - threads), -measured))]


class Contention(Value):
    """How much each of two concurrent activities is slowed: measured time / time alone (1 = not at all)."""

    first: str
    second: str
    first_slowdown: float = Field(ge=0)
    second_slowdown: float = Field(ge=0)
    format: str | None = None
    """Stored format of the weights that are computed with; None: not told."""
    first_per_s: float | None = Field(default=None, gt=0)
    """What the first was held to, per second; None: nothing."""


class HostLimits(Value):
    """What this process may use, as found at profile time (a plan for this machine reads them anew)."""

    memory_total_bytes: int = Field(gt=0)
    memory_usable_bytes: int = Field(gt=0)
    memory_limited_by: str
    """"physical", "cgroup v1 ...", "cgroup v2 ...", "ulimit"."""
    cores: int = Field(gt=0)
    cores_limited_by: str
    page_locked_limit_bytes: int | None = None
    last_level_cache_bytes: int = Field(ge=0)


class Processor(Value):
    """A processor at a tier."""

    tier: Tier
    name: str
    cores: int = Field(gt=0)
    instruction_sets: tuple[str, ...] = ()
    threads_per_core: int | None = Field(default=None, gt=0)
    """Where `cores` counts hardware threads; None: it counts physical cores."""
    numa_nodes: int | None = Field(default=None, gt=0)
    """Over which the cores are spread evenly; None: one."""


class MachineProfile(Value):
    """What this machine is: memory tiers, links, disks by file system, processors, measured curves, limits, provenance."""

    schema_version: Literal[1] = 1
    name: str
    provenance: str
    """"measured YYYY-MM-DD by lmoffload X (quick|full)", or the published source; estimates say so."""
    host: HostLimits
    processors: tuple[Processor, ...] = Field(min_length=1)
    memory: tuple[MemoryRate, ...]
    copies: tuple[MemoryRate, ...] = ()
    """Bytes per second copied within a tier's memory, beyond the last-level cache."""
    disks: tuple[Disk, ...]
    links: tuple[Link, ...] = ()
    linear: tuple[LinearCurve, ...]
    attention: tuple[AttentionCurve, ...]
    overheads: Overheads
    contention: tuple[Contention, ...] = ()
    base_bytes: int = Field(gt=0)
    """Resident bytes of the process with every library loaded and no model."""
    versions: dict[str, str] = Field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    """What could not be measured or is unsteady, one sentence each."""
    accelerator: Accelerator | EmulatedDevice | None = None
    """None: the compute tier is host memory."""
    rates: tuple[Rate, ...] = ()
    """Attention, quantizing and dequantizing by processor and way."""
    sources: tuple[Source, ...] = ()
    """Of the numbers of a profile that was not measured here."""
    calibrated_with: tuple[str, ...] = ()
    """Fingerprints of the reports of runs that were folded in."""
    default_threads_slowdown: float | None = None
    """Decode-sized product under the libraries' default (busy-waiting) threads / under ours."""
