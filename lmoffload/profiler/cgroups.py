"""Control groups, version 1 and 2: the directories whose limits bind this process, itself and every ancestor.

All paths are taken below `root`, so that a fake /proc and /sys tree can stand for another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from pathlib import Path, PurePosixPath
from typing import Literal

UNLIMITED_V1_BYTES = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size; anything from here on means no limit."""


@dataclass(frozen=True, slots=True)
class Group:
    """One control group directory of a controller."""

    version: Literal[1, 2]
    path: Path
    name: str
    """Path inside the hierarchy, e.g. "/user.slice"."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A memory limit that binds this process: `room_bytes` may still be allocated under it."""

    group: Group
    limit_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class _Mount:
    version: Literal[1, 2]
    controllers: frozenset[str]
    inner_root: str
    point: Path


def groups(root: Path, controller: str) -> Iterator[Group]:
    """This process's groups for a controller ("memory", "cpu", ...), innermost first, then every ancestor up to the mount.

    A hybrid machine has the controller in version 1; the version 2 hierarchy is then walked too and simply has no limit files.
    """
    mounts = list(_mounts(root))
    for version, controllers, inner in _memberships(root):
        if version == 1 and controller not in controllers:
            continue
        for mount in mounts:
            if mount.version == version and (version == 2 or controller in mount.controllers):
                yield from _ancestors(version, mount, inner)
                break


def memory_limits(root: Path) -> Iterator[MemoryLimit]:
    """Every finite memory limit over this process, with the room left: limit − (use − reclaimable). Swap never counts."""
    for group in groups(root, "memory"):
        limit = _limit_v1(group.path) if group.version == 1 else _limit_v2(group.path)
        if limit is None:
            continue
        use = read_int(group.path / ("memory.usage_in_bytes" if group.version == 1 else "memory.current")) or 0
        held = max(0, use - reclaimable_bytes(group))
        yield MemoryLimit(group, limit, max(0, limit - held))


def reclaimable_bytes(group: Group) -> int:
    """Page cache (and reclaimable slab) that the kernel gives back before it refuses memory. tmpfs pages are not reclaimable."""
    stat = read_table(group.path / "memory.stat")
    prefix = "total_" if group.version == 1 and "total_active_file" in stat else ""
    lists = [stat[name] for name in (f"{prefix}active_file", f"{prefix}inactive_file") if name in stat]
    cache = sum(lists) if lists else max(0, stat.get("file", stat.get("cache", 0)) - stat.get("shmem", 0))
    return cache + stat.get("slab_reclaimable", 0)


def cpu_quota(root: Path) -> tuple[int, Group] | None:
    """The smallest whole number of processors that a quota over this process allows (at least 1), and the group that says so."""
    best: tuple[int, Group] | None = None
    for group in groups(root, "cpu"):
        quota = _quota_v1(group.path) if group.version == 1 else _quota_v2(group.path)
        if quota is not None:
            cores = max(1, floor(quota))
            if best is None or cores < best[0]:
                best = (cores, group)
    return best


def read_int(path: Path) -> int | None:
    """The integer that a file holds; None when the file is missing or holds something else ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def read_table(path: Path) -> dict[str, int]:
    """Lines "name number" of a file; empty when it is missing."""
    table: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return table
    for line in lines:
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0]] = int(fields[1])
    return table


def _limit_v1(path: Path) -> int | None:
    limit = read_int(path / "memory.limit_in_bytes")
    return limit if limit is not None and 0 <= limit < UNLIMITED_V1_BYTES else None


def _limit_v2(path: Path) -> int | None:
    # Above memory.high the kernel throttles every allocation, so it is as much a limit as memory.max.
    limits = [limit for limit in (read_int(path / "memory.max"), read_int(path / "memory.high")) if limit is not None]
    return min(limits) if limits else None


def _quota_v1(path: Path) -> float | None:
    quota, period = read_int(path / "cpu.cfs_quota_us"), read_int(path / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _quota_v2(path: Path) -> float | None:
    try:
        quota, period = (path / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _memberships(root: Path) -> Iterator[tuple[Literal[1, 2], frozenset[str], str]]:
    """Lines "number:controllers:path" of /proc/self/cgroup; without the file, the top of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["1:memory:/", "2:cpu:/", "0::/"]
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, inner = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, frozenset(), inner
        elif controllers:
            yield 1, frozenset(controllers.split(",")), inner


def _mounts(root: Path) -> Iterator[_Mount]:
    """Mounted hierarchies: from /proc/self/mountinfo, or where they usually lie when it says nothing."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = False
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        found = True
        version: Literal[1, 2] = 1 if kind[0] == "cgroup" else 2
        yield _Mount(version, frozenset(kind[2].split(",")), fields[3], root / fields[4].lstrip("/"))
    if not found:
        yield from _usual_mounts(root / "sys/fs/cgroup")


def _usual_mounts(top: Path) -> Iterator[_Mount]:
    for names in ("memory", "cpu", "cpu,cpuacct"):
        if (top / names).is_dir():
            yield _Mount(1, frozenset(names.split(",")), "/", top / names)
    for point in (top, top / "unified"):
        if (point / "cgroup.controllers").exists() or (point / "memory.max").exists() or (point / "cpu.max").exists():
            yield _Mount(2, frozenset(), "/", point)
            return
    yield _Mount(2, frozenset(), "/", top)


def _ancestors(version: Literal[1, 2], mount: _Mount, inner: str) -> Iterator[Group]:
    """A container may see only its own part of a hierarchy: the path is then taken relative to what is mounted."""
    path = PurePosixPath(inner)
    if mount.inner_root != "/" and path.is_relative_to(mount.inner_root):
        path = PurePosixPath("/") / path.relative_to(mount.inner_root)
    if ".." in path.parts or not (mount.point / path.relative_to("/")).is_dir():
        path = PurePosixPath("/")
    for part in (path, *path.parents):
        yield Group(version, mount.point / part.relative_to("/"), str(part))
