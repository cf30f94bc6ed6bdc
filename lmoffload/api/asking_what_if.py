"""What-if questions as people write them."""

from __future__ import annotations

from pathlib import Path

from lmoffload.api.explaining import opened_plan
from lmoffload.errors import UsageError
from lmoffload.units import parse_size
from lmoffload_solver.what_if import Change, WhatIf, what_if


def changes_of(
    *, host_memory: str | None, device_memory: str | None, disk: str | None, link: str | None, cores: str | None
) -> tuple[Change, ...]:
    """Changes from sizes with a sign ("+8GiB") and factors ("2x").

    Raises:
        UsageError: nothing is asked, or a value has no meaning.
    """
    found = []
    if host_memory is not None:
        found.append(Change(resource="host_memory", added_bytes=_signed_size(host_memory)))
    if device_memory is not None:
        found.append(Change(resource="device_memory", added_bytes=_signed_size(device_memory)))
    if disk is not None:
        found.append(Change(resource="disk", factor=_factor(disk)))
    if link is not None:
        found.append(Change(resource="link", factor=_factor(link)))
    if cores is not None:
        found.append(Change(resource="cores", factor=_factor(cores)))
    if not found:
        raise UsageError("Nothing is asked: give one of --host-memory, --device-memory, --disk, --link or --cores, such as --disk 2x.")
    return tuple(found)


def ask(path: Path, changes: tuple[Change, ...], model: str | None, machine: str | None) -> WhatIf:
    """What the changes would make of a plan's work.

    Raises:
        StatedError: the file is no plan, or what it was made for is not found or has changed.
    """
    plan, opened, on = opened_plan(path, model, machine)
    return what_if(opened.shape, on.profile, plan, changes, file_system=on.disk_for(opened.path))


def _signed_size(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    return sign * parse_size(text.lstrip("+-"))


def _factor(text: str) -> float:
    try:
        factor = float(text.lower().removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6 or text.startswith("+"):  # "+8" cores would be eight more, not eight times as many
        raise UsageError(f"{text!r} is no factor; write how many times as fast, such as 2x.")
    return factor
