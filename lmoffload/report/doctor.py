"""What the doctor found, readable."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from lmoffload.profiler.condition import Condition, Folder
from lmoffload.profiler.diagnosis import Diagnosis, KnownProfile
from lmoffload.report.tables import facts
from lmoffload.units import format_bytes, format_number


def doctor_tables(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Machine, directories, versions, then what to change."""
    found = diagnosis.condition
    yield facts("Machine", _machine(found))
    yield facts("Directories", ((folder.role, _folder(folder)) for folder in found.folders))
    yield facts("Profile", _profile(diagnosis.profile))
    yield facts("Versions", found.versions.items())
    if diagnosis.advice:
        yield facts("What to change", ((f"{number}.", sentence) for number, sentence in enumerate(diagnosis.advice, 1)))
    else:
        yield "Nothing needs to be changed."


def _machine(found: Condition) -> Iterator[tuple[str, str]]:
    host = found.host
    yield "processor", found.processor.name
    yield "instruction sets", ", ".join(found.processor.instruction_sets) or "none that the kernels use"
    processors = format_number(found.logical_processors, "logical processor")
    yield "cores", f"{host.cores} to use of {processors}, limited by {host.cores_limited_by}"
    yield "last-level cache", format_bytes(host.last_level_cache_bytes) if host.last_level_cache_bytes else "not told by the kernel"
    yield "memory", (
        f"{format_bytes(host.memory_usable_bytes)} to use of {format_bytes(host.memory_total_bytes)}, limited by {host.memory_limited_by}"
    )
    for group in found.memory_groups:
        yield f"cgroup {group.name}", f"{format_bytes(group.room_bytes)} left of {format_bytes(group.limit_bytes)}"
    locked = host.page_locked_limit_bytes
    yield "page-locked memory", "no limit" if locked is None else f"{format_bytes(locked)} at most"
    yield "GPU", ", ".join(found.gpus) or "none that torch can use"
    if found.torch_threads is not None:
        yield "torch's own threads", f"{found.torch_threads} (lmoffload's plans say how many they take)"
    yield "waiting threads", "busy, or not known" if found.thread_remarks else "sleep (OMP_WAIT_POLICY=PASSIVE)"


def _folder(folder: Folder) -> str:
    direct = {True: "direct reads", False: "no direct reads", None: "direct reads not tried"}[folder.direct_reads]
    may = "" if folder.writable else ", read-only"
    return f"{folder.path}: {folder.kind} on {folder.device} at {folder.file_system}, {format_bytes(folder.free_bytes)} free, {direct}{may}"


def _profile(profile: KnownProfile) -> Iterator[tuple[str, str]]:
    yield "file", profile.path if profile.provenance is not None else f"{profile.path}, which is not there or not valid"
    if profile.provenance is not None:
        age = "" if profile.age_days is None else f", {format_number(profile.age_days, 'day')} ago"
        yield "made", profile.provenance + age
    for change in profile.changes:
        yield "no longer", change
