"""The machine's profile: measured, loaded, and made when there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.environment import prepare_threads
from lmoffload.profiler.store import default_profile_path, load_profile, save_profile
from lmoffload_solver.machine import MachineProfile

if TYPE_CHECKING:
    from lmoffload.profiler.progress import Progress


@dataclass(frozen=True, slots=True)
class Machine:
    """A profile, and whether it is of the machine this runs on, so that its limits are read anew."""

    profile: MachineProfile
    is_this_one: bool


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
    from lmoffload.profiler import profile as measure

    for remark in prepare_threads():
        tell(remark)
    measured = measure(quick=quick, disk=Path(disk or "."), on_progress=on_progress)
    save_profile(measured, Path(out) if out is not None else default_profile_path())
    return measured


def machine_of(
    name: str | None,
    disk: Path,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    tell: Tell = tell_on_stderr,
) -> Machine:
    """The machine called `name` (a profile file, or a name of profiles/), or this one; where it has no profile yet, the quick one is made.

    Raises:
        StatedError: there is no such profile, or it cannot be read.
    """
    if name is not None:
        return Machine(load_profile(name), is_this_one=False)
    if not default_profile_path().exists():
        tell("This machine has no profile yet: making the quick one, which takes up to a minute (`lmoffload profile` makes the full one).")
        return Machine(profile(quick=True, disk=disk, on_progress=on_progress, tell=tell), is_this_one=True)
    return Machine(load_profile(None), is_this_one=True)
