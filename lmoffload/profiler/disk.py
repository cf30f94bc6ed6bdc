"""Disk: rates of one file system against request size and requests in flight, its random read latency, and whether caches were kept out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmoffload.profiler.disk_rates import Session, is_cache_excluded, random_read, random_write, transfer_curves
from lmoffload.profiler.disk_target import opened
from lmoffload.profiler.limits import disk_of, usable_memory
from lmoffload.profiler.samples import UNSTEADY
from lmoffload_solver.machine import Disk
from lmoffload_solver.schedule import READ_REQUEST_BYTES

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(64 * KIB << i for i in range(11))
QUICK_SIZES = (64 * KIB, MIB, READ_REQUEST_BYTES, 64 * MIB)
WRITE_SIZES = (256 * KIB, 4 * MIB, 64 * MIB)
IN_FLIGHT = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class DiskReadings:
    """A disk, and what its measurement says beside the curves."""

    disk: Disk
    random_read_s: float
    remarks: tuple[str, ...]


def measure_disk(path: Path, *, budget_s: float = 20.0, quick: bool = True) -> Disk:
    """Measure the file system that holds `path` (a folder, a file, or one yet to be made) within about `budget_s`.

    Writes a nameless scratch file on that file system (in the cache or temporary folder where these lie on it, else beside `path`); where
    nothing can be written, the largest file below `path` is read instead and the write curves stay empty.

    Raises:
        StatedError: nothing can be written or read there, or too little space is free.
    """
    return read_disk(path, budget_s=budget_s, quick=quick).disk


def read_disk(
    path: Path,
    *,
    budget_s: float = 20.0,
    quick: bool = True,
    tell: Callable[[str], None] = lambda what: None,
) -> DiskReadings:
    """As `measure_disk`, with the random read latency and remarks. `tell` hears what is measured."""
    system = disk_of(path)
    with opened(path, system.free_bytes, budget_s) as target:
        memory_bytes = min(IN_FLIGHT[-1] * SIZES[-1], target.num_bytes, usable_memory() // 2)
        session = Session.of(target, memory_bytes, tell)
        cache_excluded = is_cache_excluded(session, budget_s * 0.07)
        block_read = random_read(session, budget_s * 0.03)
        sizes = QUICK_SIZES if quick else SIZES
        read = transfer_curves(session, "read", sizes, IN_FLIGHT, budget_s * 0.57)
        write = transfer_curves(session, "write", WRITE_SIZES, IN_FLIGHT[::2], budget_s * 0.14) if target.scratch else ()
        page_written = random_write(session, budget_s * 0.03) if target.scratch else None
        direct, writable = target.reader.direct, target.scratch is not None
    if not direct:
        session.remarks.append(f"{system.mount_point} refuses direct I/O: its rates are of buffered requests whose pages are dropped.")
    if not writable:
        session.remarks.append(f"{system.mount_point} cannot be written: a file found there was read, and its write rates are unknown.")
    disk = Disk(
        file_system=system.mount_point,
        device=system.device,
        read=read,
        write=write,
        direct=direct,
        cache_excluded=cache_excluded,
        free_bytes=system.free_bytes,
        random_write_s=None if page_written is None else page_written.median_s,
    )
    session.remarks.extend(_unsteady(disk))
    return DiskReadings(disk, block_read.median_s, tuple(session.remarks))


def _unsteady(disk: Disk) -> list[str]:
    """One sentence for each way with readings that vary."""
    remarks = []
    for way, curves in (("read", disk.read), ("write", disk.write)):
        worst = max((max(curve.bytes_per_s.spread) for curve in curves), default=0.0)
        if worst > UNSTEADY:
            remarks.append(f"The {way} rates of {disk.file_system} are unsteady: their spread reaches {worst:.0%} of the median.")
    return remarks
