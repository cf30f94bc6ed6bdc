"""Control groups for a peer: memory (page cache included), reads of the disks, processors; made for one run and removed after it.

Version 1 has a hierarchy for each controller, version 2 one for all; a machine may have some controllers in either. Groups are made below
the one that this process is in (version 2: below the nearest ancestor that lets its children have the controllers).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from lmoffload.profiler.cgroups import groups, read_int, read_table
from lmoffload_solver.comparison import Granted
from lmoffload_solver.errors import StatedError

Controller = Literal["memory", "disk", "processors"]
NAMES: dict[Controller, tuple[Literal["memory", "blkio", "cpuset"], Literal["memory", "io", "cpuset"]]] = {
    "memory": ("memory", "memory"),
    "disk": ("blkio", "io"),
    "processors": ("cpuset", "cpuset"),
}
"""Names of a controller in version 1 and in version 2."""
REMOVAL_S = 5.0


class NoGroupsError(StatedError):
    """Control groups cannot be made here."""


@dataclass(slots=True)
class ControlGroups:
    """Groups that a process is to enter; removed, with whatever still runs in them, when the context ends.

    Raises:
        NoGroupsError: by `open`, where the kernel or missing rights forbid them.
    """

    directories: dict[Controller, tuple[int, Path]] = field(default_factory=dict)
    """Version and directory by controller."""

    @staticmethod
    def open(granted: Granted, places: Iterable[Path], root: Path = Path("/")) -> ControlGroups:
        """Groups with these limits.

        Args:
            places: paths on the disks whose reads are limited.
            root: where a fake /proc and /sys tree lies in tests.
        """
        made = ControlGroups()
        try:
            for controller in NAMES:
                if controller != "processors" or granted.cores:
                    made._make(controller, root)
            made._limit(granted, sorted({disk_number(place, root) for place in places}) if granted.read_bytes_per_s else [])
        except (OSError, NoGroupsError) as error:
            made.remove()
            if isinstance(error, NoGroupsError):
                raise
            reason = "this needs root" if isinstance(error, PermissionError) else error.strerror or str(error)
            raise NoGroupsError(f"The kernel's control groups cannot be used here ({reason})") from error
        return made

    @property
    def entrances(self) -> tuple[Path, ...]:
        """Files that a process writes its number to in order to enter."""
        return tuple(dict.fromkeys(directory / "cgroup.procs" for _, directory in self.directories.values()))

    def memory_now(self) -> int | None:
        """Bytes in use, page cache included."""
        return self._number("memory", "memory.usage_in_bytes", "memory.current")

    def memory_peak(self) -> int | None:
        """Its highest value; None where the kernel does not keep it (version 2 before Linux 5.19)."""
        return self._number("memory", "memory.max_usage_in_bytes", "memory.peak")

    def kills(self) -> int:
        """Processes that the kernel has ended since the memory did not suffice."""
        version, directory = self.directories["memory"]
        return read_table(directory / ("memory.oom_control" if version == 1 else "memory.events")).get("oom_kill", 0)

    def bytes_read(self) -> int | None:
        """From all disks; None where the kernel does not count."""
        version, directory = self.directories["disk"]
        with suppress(OSError):
            if version == 1:
                lines = (directory / "blkio.throttle.io_service_bytes").read_text().splitlines()
                return sum(int(line.split()[2]) for line in lines if " Read " in line)
            words = (directory / "io.stat").read_text().split()
            return sum(int(word.removeprefix("rbytes=")) for word in words if word.startswith("rbytes="))
        return None

    def remove(self) -> None:
        """End what still runs in the groups, and remove them."""
        for directory in dict.fromkeys(directory for _, directory in self.directories.values()):
            end = time.monotonic() + REMOVAL_S
            while directory.exists() and time.monotonic() < end:
                with suppress(OSError):
                    for number in (directory / "cgroup.procs").read_text().split():
                        os.kill(int(number), signal.SIGKILL)
                with suppress(OSError):
                    directory.rmdir()  # the kernel lets go of a group a moment after its last process
                    break
                time.sleep(0.05)

    def __enter__(self) -> ControlGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def _make(self, controller: Controller, root: Path) -> None:
        version, parent = _parent_for(controller, root)
        directory = parent / f"lmoffload-compare-{os.getpid()}"
        directory.mkdir(exist_ok=True)
        self.directories[controller] = (version, directory)

    def _limit(self, granted: Granted, disks: Iterable[str]) -> None:
        if granted.memory_bytes is not None:
            self._write("memory", "memory.limit_in_bytes", "memory.max", str(granted.memory_bytes))
            with suppress(OSError):  # where there is no swap, there is nothing to limit
                self._write("memory", "memory.memsw.limit_in_bytes", "memory.swap.max", str(self._with_swap(granted.memory_bytes)))
        for disk in disks:
            rate = granted.read_bytes_per_s
            version, _ = self.directories["disk"]
            self._write("disk", "blkio.throttle.read_bps_device", "io.max", f"{disk} {rate}" if version == 1 else f"{disk} rbps={rate}")
        if granted.cores:
            version, directory = self.directories["processors"]
            if version == 1:  # a new group has neither processors nor memory, and nothing can enter it
                (directory / "cpuset.mems").write_text((directory.parent / "cpuset.effective_mems").read_text())
            self._write("processors", "cpuset.cpus", "cpuset.cpus", ",".join(map(str, granted.cores)))

    def _with_swap(self, memory_bytes: int) -> int:
        """Version 1 limits memory and swap together, version 2 swap alone."""
        return memory_bytes if self.directories["memory"][0] == 1 else 0

    def _write(self, controller: Controller, name_v1: str, name_v2: str, value: str) -> None:
        version, directory = self.directories[controller]
        (directory / (name_v1 if version == 1 else name_v2)).write_text(value)

    def _number(self, controller: Controller, name_v1: str, name_v2: str) -> int | None:
        version, directory = self.directories[controller]
        return read_int(directory / (name_v1 if version == 1 else name_v2))


def _parent_for(controller: Controller, root: Path) -> tuple[int, Path]:
    """Version and directory below which a group with this controller can be made."""
    name_v1, name_v2 = NAMES[controller]
    for group in groups(root, name_v1):
        if group.version == 1 and group.path.is_dir():
            return 1, group.path
    refused: OSError | None = None
    for group in groups(root, name_v2):
        if group.version == 2 and name_v2 in _words(group.path / "cgroup.controllers"):
            if name_v2 in _words(group.path / "cgroup.subtree_control"):
                return 2, group.path
            try:  # refused where the group has processes of its own
                (group.path / "cgroup.subtree_control").write_text(f"+{name_v2}")
                return 2, group.path
            except OSError as error:
                refused = error
    if refused is not None:
        raise refused
    raise NoGroupsError(f"The kernel's control groups cannot be used here (neither version has the controller {name_v2})")


def disk_number(place: Path, root: Path = Path("/")) -> str:
    """MAJOR:MINOR of the whole disk that holds a path: limits are set on disks, not on their partitions.

    Raises:
        NoGroupsError: the file system lies on no disk.
    """
    number = os.stat(place).st_dev
    if os.major(number) == 0:  # btrfs and the like number their file systems themselves
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        holding = [fields for fields in mounts if place.resolve().is_relative_to(fields[4])]
        source = max(holding, key=lambda fields: len(fields[4]))[-2]
        if not source.startswith("/dev/"):
            raise NoGroupsError(f"The file system of {place} lies on no disk ({source}), so that its reads cannot be limited")
        number = os.stat(source).st_rdev
    device = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()


def _words(path: Path) -> Iterator[str]:
    with suppress(OSError):
        yield from path.read_text().split()
