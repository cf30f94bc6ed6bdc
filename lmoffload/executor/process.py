"""What the kernel says of this process: memory and disk traffic."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")


def reset_peak() -> None:
    """Make the peak of resident memory start anew, where the kernel allows it."""
    with suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def resident_bytes() -> int:
    """Resident memory now; 0 where the kernel does not say."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Peak of resident memory since the process, or the last `reset_peak`, began; 0 where the kernel does not say."""
    return _status("VmHWM")


def bytes_read_from_disk() -> int:
    """Bytes this process has caused to be read from storage; 0 where the kernel does not say."""
    with suppress(OSError):
        for line in (_SELF / "io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "read_bytes":
                return int(value)
    return 0


def thread_cpu_s(native_id: int) -> float:
    """Seconds that a thread of this process has run on a core; 0 where the kernel does not say, or the thread has ended."""
    with suppress(OSError, ValueError):
        return int((_SELF / "task" / str(native_id) / "schedstat").read_text().split()[0]) / 1e9
    return 0.0


def _status(field: str) -> int:
    with suppress(OSError):
        for line in (_SELF / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    return 0
