"""Links between host memory and an accelerator: page-locked and pageable, each way and both at once.

Written for CUDA and not yet run on one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lmoffload.profiler.curves import curve_of
from lmoffload.profiler.limits import read_limits
from lmoffload.profiler.samples import repeat
from lmoffload_solver.machine import Link

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
SIZES = (MIB // 16, MIB // 2, 4 * MIB, 16 * MIB, 64 * MIB)
MEMORY_SHARE = 16
Direction = Literal["upload", "download", "both"]
DIRECTIONS: tuple[Direction, ...] = ("upload", "download", "both")


def link_curves(budget_s: float, tell: Callable[[str], None] = lambda what: None) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Bytes per second (of both ways together, for "both") against the size of one copy; and remarks. Nothing where there is no CUDA."""
    import torch

    if not torch.cuda.is_available():
        return (), ()
    allowed = min(read_limits().memory_usable_bytes, torch.cuda.mem_get_info()[0]) // MEMORY_SHARE
    sizes = [size for size in SIZES if size <= allowed] or [SIZES[0]]
    links: list[Link] = []
    remarks: list[str] = []
    for page_locked in (True, False):
        try:
            host = [torch.empty(sizes[-1], dtype=torch.uint8, pin_memory=page_locked) for _ in range(2)]
        except RuntimeError:
            remarks.append("Page-locked memory was refused: only pageable transfers were measured.")
            continue
        device = [torch.empty(sizes[-1], dtype=torch.uint8, device="cuda") for _ in range(2)]
        for direction in DIRECTIONS:
            tell(f"link, {direction}, {'page-locked' if page_locked else 'pageable'}")
            share_s = budget_s / (2 * len(DIRECTIONS) * len(sizes))
            samples = [repeat(partial(_copy, direction, host, device, size), share_s) for size in sizes]
            amounts = [float(size * (2 if direction == "both" else 1)) for size in sizes]
            curve = curve_of(sizes, amounts, samples, law=True)
            links.append(Link(near="device", far="host", direction=direction, page_locked=page_locked, bytes_per_s=curve))
    return tuple(links), tuple(remarks)


def _copy(direction: Direction, host: list[torch.Tensor], device: list[torch.Tensor], size: int) -> None:
    """Copies on streams of their own, waited for."""
    import torch

    streams: list[Any] = []
    if direction != "download":
        streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        with torch.cuda.stream(streams[-1]):
            device[0][:size].copy_(host[0][:size], non_blocking=True)
    if direction != "upload":
        streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        with torch.cuda.stream(streams[-1]):
            host[1][:size].copy_(device[1][:size], non_blocking=True)
    for stream in streams:
        stream.synchronize()
