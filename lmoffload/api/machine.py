"""The machine's profile: measured, loaded, and made when there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.documents import check_place
from lmoffload.profiler.apart import measure_disk_apart, profile_apart
from lmoffload.profiler.limits import disk_of
from lmoffload.profiler.store import default_profile_path, load_profile, save_profile
from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.emulated import emulated
from lmoffload_solver.machine import MachineProfile

if TYPE_CHECKING:
    from lmoffload.profiler.progress import Progress


@dataclass(frozen=True, slots=True)
class Machine:
    """A profile, and whether the work is to be done here, so that this process's limits hold."""

    profile: MachineProfile
    is_here: bool
    place: str | None = None
    """The file or name of the profile; None for this machine's own."""

    def emulating(self, device: EmulatedDevice | None) -> Machine:
        """The same with a device emulated on it.

        Raises:
            StatedError: it has a device, or not the memory for one.
        """
        return self if device is None else replace(self, profile=emulated(self.profile, device))

    def disk_for(self, path: Path | None) -> str | None:
        """The measured file system that holds `path`; None, for the first one measured, where the profile does not know it."""
        if path is None or not self.is_here:
            return None
        mount_point = disk_of(path).mount_point
        return mount_point if any(disk.file_system == mount_point for disk in self.profile.disks) else None


def profile(
    *,
    quick: bool = False,
    disk: str | Path | None = None,
    out: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    tell: Tell = tell_on_stderr,
) -> MachineProfile:
    """Measure this machine and keep the profile where later plans find it.

    Args:
        quick: within 60 s instead of within 5 minutes.
        disk: a path on the disk to measure; the current folder's by default.
        out: file to write instead of the default one in the user's data directory.

    Raises:
        StatedError: nothing can be measured or written there.
    """
    place = Path(out) if out is not None else default_profile_path()
    if place.parent.is_dir():
        check_place(place, "profile")
    measured = profile_apart(quick=quick, disk_path=Path(disk or "."), on_progress=on_progress, on_remark=tell)
    save_profile(measured, place)
    return measured


def machine_of(
    name: str | None,
    disk: Path | None,
    *,
    is_here: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    tell: Tell = tell_on_stderr,
) -> Machine:
    """The machine called `name` (a profile file, or a name of profiles/), or this one.

    Where this one has no profile yet, the quick one is made; where its profile does not know the disk that holds `disk`, that is
    measured now and kept.

    Args:
        is_here: the work is to be done on this machine, whatever profile is named.

    Raises:
        StatedError: there is no such profile, or it cannot be read.
    """
    if name is not None:
        path = Path(name)
        return Machine(load_profile(name), is_here, str(path.absolute()) if path.exists() else name)
    if not default_profile_path().exists():
        tell("This machine has no profile yet: making the quick one, which takes up to a minute (`lmoffload profile` makes the full one).")
        return Machine(profile(quick=True, disk=disk, on_progress=on_progress, tell=tell), is_here=True)
    machine = Machine(load_profile(None), is_here=True)
    if disk is None or machine.disk_for(disk) is not None:
        return machine
    return Machine(_with_disk(machine.profile, disk, tell), is_here=True)


def _with_disk(known: MachineProfile, path: Path, tell: Tell) -> MachineProfile:
    """The profile with the disk that holds `path` added, and kept."""
    tell(f"The disk that holds {path} is not in this machine's profile yet: measuring it, which takes up to 20 seconds.")
    extended = known.model_copy(update={"disks": (*known.disks, measure_disk_apart(path))})
    save_profile(extended, default_profile_path())
    return extended
