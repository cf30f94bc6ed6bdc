"""Limits as people write them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lmoffload.errors import UsageError
from lmoffload.units import parse_duration, parse_size, parse_size_or_share
from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.workload import Limits


def limits_of(
    *,
    host_memory: str | None = None,
    device_memory: str | None = None,
    disk_space: str | None = None,
    weights_memory: str | None = None,
    threads: int | None = None,
    cores: str | None = None,
    micro_batch: int | None = None,
    num_micro_batches: int | None = None,
    solve_time: str | None = None,
    emulate_device: Sequence[str] | str | None = None,
) -> Limits:
    """Limits from sizes ("4GiB", "500MB"), a share of the weights ("40%"), a duration ("30s"), a device or several ("512MiB@2GB/s")
    and counts. Of a list of processors ("0-1,4") their number is taken for the threads, where these are not given.

    Raises:
        UsageError: a value has no meaning.
    """
    weights_bytes, weights_share = (None, None) if weights_memory is None else parse_size_or_share(weights_memory)
    for name, count in (("threads", threads), ("micro-batch", micro_batch), ("num-micro-batches", num_micro_batches)):
        if count is not None and count < 1:
            raise UsageError(f"The number given for {name} is {count}; it must be at least 1.")
    if cores is not None and threads is None:
        threads = len(_listed(cores))
    host_bytes = None if host_memory is None else parse_size(host_memory)
    if host_bytes == 0:
        raise UsageError("A host memory of 0 leaves nothing to run in.")
    device_bytes = None if device_memory is None else parse_size(device_memory)
    if device_bytes == 0:
        raise UsageError("A device memory of 0 is no device; name a machine without one instead.")
    given = Limits(
        host_memory_bytes=host_bytes,
        device_memory_bytes=device_bytes,
        disk_space_bytes=None if disk_space is None else parse_size(disk_space),
        weights_memory_bytes=weights_bytes,
        weights_memory_share=weights_share,
        emulated_device=emulated_devices_of([emulate_device] if isinstance(emulate_device, str) else emulate_device or ()),
        threads=threads,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
    )
    return given if solve_time is None else given.model_copy(update={"solve_s": parse_duration(solve_time)})


def emulated_devices_of(texts: Sequence[str]) -> EmulatedDevice | None:
    """Devices that are alike, each as `emulated_device_of` takes it; None where there are none.

    Raises:
        UsageError: a text is none, or they differ.
    """
    devices = [emulated_device_of(text) for text in texts]
    if len(set(devices)) > 1:
        raise UsageError("The emulated devices differ; several have to be alike, since each computes an equal part.")
    return devices[0].model_copy(update={"count": len(devices)}) if devices else None


def emulated_device_of(text: str) -> EmulatedDevice:
    """A device from its memory and the rate of its link each way, such as "512MiB@2GB/s".

    Raises:
        UsageError: the text is none.
    """
    memory, at, rate = text.partition("@")
    if not at or not rate.endswith("/s"):
        raise UsageError(f"{text!r} is no device; write its memory and the rate of its link, such as 512MiB@2GB/s.")
    num_bytes, bytes_per_s = parse_size(memory), parse_size(rate.removesuffix("/s"))
    if not num_bytes or not bytes_per_s:
        raise UsageError(f"The device {text!r} has no memory or no link; give both a size above 0.")
    return EmulatedDevice(memory_bytes=num_bytes, bytes_per_s=float(bytes_per_s))


def cores_of(text: str) -> tuple[int, ...]:
    """Numbers of processors from a list such as "0-1,4", all of which this process may use.

    Raises:
        UsageError: it is no list, or this process may not use one of them.
    """
    from lmoffload.profiler.limits import allowed_processors

    found = _listed(text)
    missing = sorted(set(found) - set(allowed_processors()))
    if missing:
        raise UsageError(f"This process may not use the processor {missing[0]}.")
    return found


def _listed(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdigit() and (last or first).isdigit()) or int(last or first) < int(first) or int(last or first) > 1 << 16:
            raise UsageError(f"{text!r} is no list of processors; write one like 0-1,4.")
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))


def keep_to(cores: str) -> None:
    """Have this process, and what it starts, run on a list of processors alone, where the system can.

    Raises:
        UsageError: see `cores_of`.
    """
    wanted = cores_of(cores)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, wanted)
