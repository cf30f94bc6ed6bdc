"""How soon a thread that wakes up gets a core from one that computes."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress

SHORT_TURN_NS = 100_000
"""The least that Linux allows."""

_NUMBERS = {"x86_64": 314, "aarch64": 274}
"""Of the system call `sched_setattr`, by machine."""


class _Attributes(ctypes.Structure):
    """Linux' `struct sched_attr`."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_short_turns() -> bool:
    """Ask for short turns for the calling thread, which waits much and works briefly: since Linux 6.12 it then takes a core at once
    as it wakes up, where it waited for another thread's turn (some 3 ms) to end. Its share of the cores stays the same.

    Returns:
        Whether the kernel has taken it; without, all goes on as it would.
    """
    number = _NUMBERS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    with suppress(OSError, AttributeError):
        call = ctypes.CDLL(None, use_errno=True).syscall
        policy, nice = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        asked = _Attributes(size=ctypes.sizeof(_Attributes), policy=policy, nice=nice, runtime=SHORT_TURN_NS)
        return bool(call(ctypes.c_long(number), ctypes.c_int(0), ctypes.byref(asked), ctypes.c_uint(0)) == 0)
    return False
