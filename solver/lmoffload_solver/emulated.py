"""The machine that emulating a device makes of a measured one: no new measurement, only what its curves already say."""

from __future__ import annotations

import numpy as np

from lmoffload_solver import costs
from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import Contention, Curve, Link, MachineProfile
from lmoffload_solver.value import Tier
from lmoffload_solver.workload import Limits

COPY_SIZES = (2.0**12, 2.0**16, 2.0**20, 2.0**24, 2.0**28)

WHOLE_COPY_SHARE = 1 / 3
"""Rate of copying over that of reading, where copying was not measured: a copy reads, reads what it will overwrite, and writes."""


def emulated(profile: MachineProfile, device: EmulatedDevice) -> MachineProfile:
    """A machine with an emulated device: its memory is taken from the host's, and its links are held to its rate.

    Raises:
        StatedError: the machine has a device, or not the memory for one.
    """
    if profile.accelerator is not None:
        raise StatedError(f"The machine {profile.name!r} has a device; name one without to emulate a device on it.")
    size = device.count * device.memory_bytes
    left = profile.host.memory_usable_bytes - size
    if left <= profile.base_bytes:
        raise StatedError(f"An emulated device of {size} bytes leaves {max(0, left)} bytes to the process; emulate a smaller one.")
    copying, times = copy_rate(profile), f"{device.count} x " if device.count > 1 else ""
    return profile.model_copy(
        update={
            "name": f"{profile.name}, emulating {times}{device.memory_bytes} bytes at {device.bytes_per_s:g} bytes/s",
            "host": profile.host.model_copy(update={"memory_usable_bytes": left}),
            "accelerator": device,
            "links": links_of(device, copying, profile.overheads.handover_s or 0.0),
            "contention": (*profile.contention, *_contention(profile, device, copying)),
        }
    )


def bare(profile: MachineProfile, limits: Limits) -> tuple[MachineProfile, Limits]:
    """A machine without the device that it emulates, and limits for it: its memory is the process's own."""
    device = profile.accelerator
    if not isinstance(device, EmulatedDevice):
        return profile, limits
    size = device.count * device.memory_bytes
    usable = profile.host.memory_usable_bytes + size
    granted = None if limits.host_memory_bytes is None else limits.host_memory_bytes + size
    host = profile.host.model_copy(update={"memory_usable_bytes": usable})
    changes = {"host_memory_bytes": granted, "emulated_device": None, "device_memory_bytes": None}
    return profile.model_copy(update={"accelerator": None, "links": (), "host": host}), limits.model_copy(update=changes)


def copy_rate(profile: MachineProfile) -> float:
    """Bytes per second that one thread copies in host memory.

    Raises:
        StatedError: the profile lacks all rates of memory.
    """
    measured = [rate.bytes_per_s for rate in profile.copies if rate.threads == 1]
    measured += [WHOLE_COPY_SHARE * rate.bytes_per_s for rate in sorted(profile.memory, key=lambda rate: rate.threads)]
    if not measured:
        raise StatedError(f"The machine profile {profile.name!r} lacks rates of memory; run `lmoffload profile` again.")
    return measured[0]


def links_of(device: EmulatedDevice, copying: float, handover_s: float) -> tuple[Link, ...]:
    """Each way: a task handed to the thread, and bytes at the rate, or as fast as they are copied."""
    rate = min(device.bytes_per_s, copying)
    speeds = tuple(size / (handover_s + size / rate) for size in COPY_SIZES)
    curve = Curve(x=COPY_SIZES, y=speeds, spread=(0.0,) * len(COPY_SIZES))
    near: Tier = "device"
    return tuple(
        Link(near=near, far="host", direction=direction, page_locked=True, bytes_per_s=curve) for direction in ("upload", "download")
    )


def _contention(profile: MachineProfile, device: EmulatedDevice, copying: float) -> tuple[Contention, ...]:
    """Of copies and reads with computing."""
    slow_copy, slow_compute = _copying(profile, device.bytes_per_s, copying)
    found = []
    for link in ("upload", "download"):
        found.append(Contention(first=link, second="device", first_slowdown=slow_copy, second_slowdown=slow_compute))
    found.append(Contention(first="upload", second="host_attention", first_slowdown=slow_copy, second_slowdown=slow_compute))
    reading = costs.Contention.of(profile, "disk_read", "host_compute")
    for computing in ("device", "host_attention"):
        found.append(Contention(first="disk_read", second=computing, first_slowdown=reading.read, second_slowdown=reading.compute))
    return tuple(found)


def _copying(profile: MachineProfile, bytes_per_s: float, copying: float) -> tuple[float, float]:
    """Slowdowns of a copy held to a rate and of computing beside it: between those of the rates that were measured."""
    known = [entry for entry in profile.contention if (entry.first, entry.second) == ("copy", "host_compute")]
    if not known:
        return 1.0, 1.0
    known.sort(key=lambda entry: entry.first_per_s or copying)
    rates = np.log([entry.first_per_s or copying for entry in known])
    slowdowns = ([entry.first_slowdown for entry in known], [entry.second_slowdown for entry in known])
    first, second = (float(np.interp(np.log(min(bytes_per_s, copying)), rates, one)) for one in slowdowns)
    return max(1.0, first), max(1.0, second)
