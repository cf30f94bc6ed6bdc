"""What this process may use: memory, cores, page-locked memory, caches, and the file system of a path.

Memory: usable = min(MemAvailable, limit − (use − reclaimable)) over this process's control group and all its ancestors, and what
`ulimit` leaves. Swap never counts. Cores: min(affinity, floor(quota), physical), at least 1.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from lmoffload.profiler.cgroups import cpu_quota, memory_limits, read_int
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import HostLimits


class FileSystem(NamedTuple):
    """The file system that holds a path."""

    mount_point: str
    device: str
    free_bytes: int


def read_limits(root: Path = Path("/")) -> HostLimits:
    """Read the limits of this process, live; another `root` reads a fake /proc and /sys tree below it.

    `memory_usable_bytes` is what may still be allocated: memory that this process holds already is not in it.
    """
    total = _meminfo(root).get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    usable, memory_by = _usable_memory(root, total)
    cores, cores_by = _usable_cores(root)
    return HostLimits(
        memory_total_bytes=total,
        memory_usable_bytes=max(1, usable),
        memory_limited_by=memory_by,
        cores=cores,
        cores_limited_by=cores_by,
        page_locked_limit_bytes=_resource_limits(root).get("Max locked memory"),
        last_level_cache_bytes=last_level_cache_bytes(root),
    )


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes that may still be allocated by this process."""
    return read_limits(root).memory_usable_bytes


def memory_of_process(root: Path = Path("/")) -> int:
    """Bytes that this process may have in all: what may still be allocated, and what it holds already (libraries' files aside)."""
    status = _status(root)
    return usable_memory(root) + _kib(status, "RssAnon") + _kib(status, "RssShmem")


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may keep busy at once."""
    return _usable_cores(root)[0]


def allowed_processors(root: Path = Path("/")) -> tuple[int, ...]:
    """Numbers of the logical processors that affinity allows, one per physical core first, then their siblings."""
    allowed = _affinity(root)
    first_of: dict[tuple[int, int], int] = {}
    for cpu in allowed:
        first_of.setdefault(_core_of(root, cpu), cpu)
    firsts = sorted(first_of.values())
    return (*firsts, *(cpu for cpu in allowed if cpu not in set(firsts)))


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Sum of the distinct last-level caches of the processors that affinity allows; 0 when the kernel does not say."""
    instances: dict[tuple[int, str], int] = {}
    for cpu in _affinity(root):
        for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, kind, size, shared = (_word(index / name) for name in ("level", "type", "size", "shared_cpu_list"))
            if level and size and kind in ("Unified", "Data"):
                instances[int(level), shared or str(cpu)] = _cache_size(size)
    if not instances:
        return 0
    last = max(level for level, _ in instances)
    return sum(size for (level, _), size in instances.items() if level == last)


def disk_of(path: Path) -> FileSystem:
    """Mount point, device and free bytes of the file system that holds `path` (or its nearest existing parent).

    Raises:
        StatedError: the file system cannot be read.
    """
    import psutil

    place = path.resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    best = ("/", "unknown")
    for part in psutil.disk_partitions(all=True):
        # A later mount on the same point covers the earlier one.
        if place.is_relative_to(part.mountpoint) and len(part.mountpoint) >= len(best[0]):
            best = (part.mountpoint, part.device)
    try:
        free = psutil.disk_usage(str(place)).free
    except OSError as error:
        raise StatedError(f"The file system of {path} cannot be read: {error.strerror}.") from error
    return FileSystem(best[0], best[1], free)


def _usable_memory(root: Path, total: int) -> tuple[int, str]:
    """The smallest of all rooms, and what sets it."""
    rooms = [(_meminfo(root).get("MemAvailable", total), "physical")]
    for limit in memory_limits(root):
        rooms.append((limit.room_bytes, f"cgroup v{limit.group.version} {limit.group.name}"))
    limits, status = _resource_limits(root), _status(root)
    for row, used in (("Max address space", "VmSize"), ("Max data size", "VmData")):
        ceiling = limits.get(row)
        if ceiling is not None:
            rooms.append((max(0, ceiling - _kib(status, used)), "ulimit"))
    return min(rooms, key=lambda room: room[0])


def _usable_cores(root: Path) -> tuple[int, str]:
    allowed = _affinity(root)
    physical = len({_core_of(root, cpu) for cpu in allowed})
    visible = len(_expand(_word(root / "sys/devices/system/cpu/online") or "")) or len(allowed)
    cores, by = (len(allowed), "affinity") if len(allowed) < visible else (len(allowed), "physical")
    if physical < cores:
        cores, by = physical, "physical" if by == "physical" else "affinity"
    quota = cpu_quota(root)
    if quota is not None and quota[0] < cores:
        cores, by = quota[0], f"quota of cgroup v{quota[1].version} {quota[1].name}"
    return max(1, cores), by


def _affinity(root: Path) -> list[int]:
    """Logical processors that this thread may run on."""
    allowed = _expand(_status(root).get("Cpus_allowed_list", ""))
    if not allowed:
        allowed = _expand(_word(root / "sys/devices/system/cpu/online") or "")
    return allowed or list(range(os.cpu_count() or 1))


def _core_of(root: Path, cpu: int) -> tuple[int, int]:
    """(package, core) of a logical processor; its own core where the kernel does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    core, package = read_int(topology / "core_id"), read_int(topology / "physical_package_id")
    return (package or 0, core) if core is not None else (-1, cpu)


def _expand(ranges: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]."""
    found: list[int] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match:
            found.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    table: dict[str, int] = {}
    for name, value in _lines(root / "proc/meminfo").items():
        match = re.match(r"(\d+)(\s*kB)?", value)
        if match:
            table[name] = int(match[1]) * (1024 if match[2] else 1)
    return table


def _resource_limits(root: Path) -> dict[str, int]:
    """Soft limits of /proc/self/limits that are finite, in their own unit (bytes for memory)."""
    try:
        lines = (root / "proc/self/limits").read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, int] = {}
    for line in lines:
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\d+)\s", line)
        if match:
            found[match[1]] = int(match[2])
    return found


def _status(root: Path) -> dict[str, str]:
    return _lines(root / "proc/self/status")


def _kib(status: dict[str, str], name: str) -> int:
    """Bytes of a "N kB" entry, 0 when it is missing."""
    match = re.match(r"(\d+)\s*kB", status.get(name, ""))
    return int(match[1]) * 1024 if match else 0


def _lines(path: Path) -> dict[str, str]:
    """Lines "name: value" of a file; empty when it is missing."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _word(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cache_size(size: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", size)
    return int(match[1]) * 1024 ** " KMG".index(match[2] or " ") if match else 0
