"""The diagnosis of a machine: its condition, its profile, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from lmoffload.profiler.condition import Condition, Folder, read_condition
from lmoffload.profiler.store import default_profile_path, load_profile
from lmoffload.units import format_bytes
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.value import Value

OLD_DAYS = 180
LITTLE_SPACE_BYTES = 2 << 30
"""Less than the quantized store of a small model takes."""
DECIDE_SPEED = ("torch", "transformers", "llvmlite", "kernel")
"""Versions that a profile holds for."""
VECTORS = frozenset({"avx2", "avx512f", "asimd"})
"""Instruction sets without which kernels are slow."""


class KnownProfile(Value):
    """This machine's profile, as found."""

    path: str
    provenance: str | None
    """None: there is none, or it cannot be read."""
    age_days: int | None
    """None: not told."""
    changes: tuple[str, ...]
    """What is no longer as it was measured."""
    error: str | None
    """Why it cannot be used."""


class Diagnosis(Value):
    """What `lmoffload doctor` prints."""

    condition: Condition
    profile: KnownProfile
    advice: tuple[str, ...]
    """What to change, one sentence each, the most urgent first."""


def diagnose(places: dict[str, Path], today: date) -> Diagnosis:
    """Look at this machine, its profile, and the directories in `places`, by what they are for."""
    condition = read_condition(places)
    profile = known_profile(condition, today)
    return Diagnosis(condition=condition, profile=profile, advice=tuple(advise(condition, profile)))


def advise(found: Condition, profile: KnownProfile) -> Iterator[str]:
    """What to change, one sentence each."""
    if found.torch_error is not None:
        yield f"torch cannot be loaded ({found.torch_error:.200}): install it anew, `pip install --force-reinstall torch`."
    yield from found.thread_remarks
    yield from _about_profile(profile)
    yield from _about_limits(found)
    for folder in found.folders:
        yield from _about_folder(folder)


def _about_profile(profile: KnownProfile) -> Iterator[str]:
    if profile.error is not None:
        yield profile.error
    elif profile.changes:
        yield f"The profile no longer fits ({'; '.join(profile.changes)}): run `lmoffload profile`."
    elif profile.age_days is not None and profile.age_days > OLD_DAYS:
        yield f"The profile is {profile.age_days} days old: run `lmoffload profile` where the machine may have changed."
    elif "(quick)" in (profile.provenance or ""):
        yield "The profile is the quick one: `lmoffload profile` takes up to 5 minutes and makes predictions closer."


def _about_limits(found: Condition) -> Iterator[str]:
    host = found.host
    if host.memory_limited_by != "physical":
        yield (
            f"Memory is limited to {format_bytes(host.memory_usable_bytes)} of {format_bytes(host.memory_total_bytes)} by "
            f"{host.memory_limited_by}: raise that limit where more is wanted."
        )
    elif host.memory_usable_bytes < host.memory_total_bytes // 2:
        yield (
            f"Of {format_bytes(host.memory_total_bytes)} of memory {format_bytes(host.memory_usable_bytes)} are free: "
            "end what else is running where a larger plan is wanted."
        )
    if host.cores_limited_by != "physical":
        yield f"Only {host.cores} of {found.logical_processors} processors may be used, by {host.cores_limited_by}: raise it where wanted."
    if found.gpus and host.page_locked_limit_bytes is not None and host.page_locked_limit_bytes < host.memory_usable_bytes:
        yield (
            f"Only {format_bytes(host.page_locked_limit_bytes)} may be page-locked, which slows copies to the GPU: "
            "raise it with `ulimit -l unlimited`."
        )
    if not VECTORS & set(found.processor.instruction_sets):
        yield "The processor has no vector instructions that the kernels use (AVX2, AVX-512, NEON): computing will be slow."


def _about_folder(folder: Folder) -> Iterator[str]:
    if folder.role in ("cache", "data") and not folder.writable:
        yield f"The {folder.role} directory {folder.path} cannot be written: make it yours, or set XDG_{folder.role.upper()}_HOME."
    if folder.role == "cache" and folder.free_bytes < LITTLE_SPACE_BYTES:
        yield (
            f"Only {format_bytes(folder.free_bytes)} are free for quantized weights in {folder.path}: "
            "free some, or set XDG_CACHE_HOME to another disk."
        )
    if folder.role in ("model", "cache") and folder.direct_reads is False:
        yield (
            f"Direct reads are refused in {folder.path} ({folder.kind}), so weights are read through the page cache, which is slower: "
            "keep them on a local disk."
        )


def known_profile(found: Condition, today: date) -> KnownProfile:
    """This machine's profile, held against what was found."""
    path = default_profile_path()
    try:
        profile = load_profile(None)
    except StatedError as error:
        return KnownProfile(path=str(path), provenance=None, age_days=None, changes=(), error=str(error))
    measured = re.search(r"\d{4}-\d{2}-\d{2}", profile.provenance)
    age = None if measured is None else (today - date.fromisoformat(measured[0])).days
    changes = tuple(_changes(profile, found))
    return KnownProfile(path=str(path), provenance=profile.provenance, age_days=age, changes=changes, error=None)


def _changes(profile: MachineProfile, found: Condition) -> Iterator[str]:
    host = next((processor for processor in profile.processors if processor.tier == "host"), None)
    if host is not None and host.name != found.processor.name:
        yield f"it is of the processor {host.name}, this one is {found.processor.name}"
    if profile.host.cores != found.host.cores:
        yield f"it is of {profile.host.cores} cores, now there are {found.host.cores}"
    for name in DECIDE_SPEED:
        was, now = profile.versions.get(name), found.versions.get(name)
        if was is not None and was != now:
            yield f"{name} was {was} and is {now}"
