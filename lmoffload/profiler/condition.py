"""The condition of a machine: what a run would find here. Looked at, not measured; nothing is kept, and no profile is needed."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from lmoffload.environment import thread_remarks
from lmoffload.profiler.cgroups import memory_limits
from lmoffload.profiler.limits import disk_of, read_limits
from lmoffload.profiler.processor import host_processor, versions
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import HostLimits, Processor
from lmoffload_solver.value import Value


class GroupLimit(Value):
    """A control group whose memory limit binds this process."""

    name: str
    """With its version: "v2 /user.slice"."""
    limit_bytes: int
    room_bytes: int
    """What may still be allocated under it."""


class Folder(Value):
    """A directory that lmoffload reads or writes."""

    role: str
    path: str
    file_system: str
    """Mount point."""
    kind: str
    """Type of the file system, such as ext4."""
    device: str
    free_bytes: int
    writable: bool
    direct_reads: bool | None
    """Reads past the page cache are possible; None: not known, since nothing can be written or read there."""


class Condition(Value):
    """What was found."""

    host: HostLimits
    processor: Processor
    logical_processors: int
    memory_groups: tuple[GroupLimit, ...]
    versions: dict[str, str]
    torch_error: str | None
    """Why torch cannot be loaded, where it cannot."""
    torch_threads: int | None
    """Threads that torch would take by itself."""
    thread_remarks: tuple[str, ...]
    """What is wrong with the way in which threads wait; see `lmoffload.environment`."""
    gpus: tuple[str, ...]
    folders: tuple[Folder, ...]


def read_condition(places: dict[str, Path], root: Path = Path("/")) -> Condition:
    """Look at this machine, and at the directories in `places` (by what they are for). `root`: as for `read_limits`.

    Loads torch, and says so where that fails.
    """
    torch_error, torch_threads, gpus = _torch()
    host = read_limits(root)
    return Condition(
        host=host,
        processor=host_processor(host.cores, root),
        logical_processors=os.cpu_count() or 1,
        memory_groups=tuple(
            GroupLimit(name=f"v{limit.group.version} {limit.group.name}", limit_bytes=limit.limit_bytes, room_bytes=limit.room_bytes)
            for limit in memory_limits(root)
        ),
        versions=versions(),
        torch_error=torch_error,
        torch_threads=torch_threads,
        thread_remarks=thread_remarks(),
        gpus=gpus,
        folders=tuple(_folder(role, path, torch_error is None) for role, path in places.items()),
    )


def _torch() -> tuple[str | None, int | None, tuple[str, ...]]:
    """(error, threads, names of GPUs)."""
    try:
        import torch

        from lmoffload.profiler.cuda_names import device_names

        return None, torch.get_num_threads(), device_names()
    except Exception as error:  # a broken installation may raise anything, and to say so is what this is for
        return " ".join(str(error).split()) or type(error).__name__, None, ()


def _folder(role: str, path: Path, can_probe: bool) -> Folder:
    place = path.expanduser().resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    folder = place if place.is_dir() else place.parent
    found, writable = disk_of(place), os.access(folder, os.W_OK | os.X_OK)
    direct = _direct_reads(place, folder if writable else None) if can_probe else None
    return Folder(
        role=role, path=str(path), file_system=found.mount_point, kind=_kind_of(found.mount_point), device=found.device,
        free_bytes=found.free_bytes, writable=writable, direct_reads=direct,
    )  # fmt: skip


def _kind_of(mount_point: str) -> str:
    import psutil

    kinds = [part.fstype for part in psutil.disk_partitions(all=True) if part.mountpoint == mount_point]
    return kinds[-1] if kinds else "unknown"


def _direct_reads(place: Path, writable: Path | None) -> bool | None:
    """Tried as a run does it: on a file of the model, else on a page written there and removed."""
    from lmoffload.executor.direct_file import DirectFile
    from lmoffload_solver.schedule import PAGE_BYTES

    def direct(path: Path) -> bool:
        file = DirectFile(path)
        file.close()
        return file.direct

    with suppress(OSError, StatedError):
        if place.is_file():
            return direct(place)
        for name in ("*.safetensors", "*.gguf"):
            for found in sorted(place.glob(name)):
                return direct(found)
        if writable is not None:
            with tempfile.NamedTemporaryFile(prefix=".lmoffload-doctor-", dir=writable) as file:
                file.write(bytes(PAGE_BYTES))
                file.flush()
                return direct(Path(file.name))
    return None
