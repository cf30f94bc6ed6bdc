"""The environment that the threads and the allocator need, set before torch is loaded.

Busy-waiting OpenMP threads decode several times slower than one thread on few cores (docs/log.md), and their policy is read once, when the
OpenMP library is loaded with torch.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

_WAIT_POLICY = "OMP_WAIT_POLICY"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt(3)."""


def prepare_threads() -> tuple[str, ...]:
    """Make the OpenMP threads of a torch that is loaded later sleep while they wait.

    Returns:
        Remarks for the user and the report, one sentence each; none where all is well.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(_WAIT_POLICY, "PASSIVE")
    return thread_remarks()


def thread_remarks() -> tuple[str, ...]:
    """What is wrong with the threads' waiting, one sentence each.

    The variable is never set once torch is loaded, so it tells what torch found."""
    policy = os.environ.get(_WAIT_POLICY, "")
    if policy.strip().lower() == "passive":
        return ()
    if not policy:
        cause = "torch was loaded before lmoffload could set OMP_WAIT_POLICY=PASSIVE; set that variable, or load torch later"
    else:
        cause = f"OMP_WAIT_POLICY is {policy}; PASSIVE is what lmoffload needs"
    return (f"Threads may wait busily and slow each other down: {cause}.",)


def environment_of_child(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment as it would be without `prepare_threads`, with some changes: for programs that are not ours."""
    inherited = {name: value for name, value in os.environ.items() if name != _WAIT_POLICY}
    return {**inherited, **changes}


def prepare_streams() -> None:
    """Open what the caller closed of the standard streams, so that no file of ours takes their place; writing to a closed standard output
    stays an error."""
    for name, descriptor, flags in (("stdin", 0, os.O_RDONLY), ("stdout", 1, os.O_RDONLY), ("stderr", 2, os.O_WRONLY)):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            raw: Any = io.FileIO(descriptor, "r" if name == "stdin" else "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))  # nothing is left to fail at exit


def on_terminal() -> bool:
    """Whether somebody sits there: standard input and output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def prepare_signals() -> None:
    """A polite request to end (SIGTERM, as of a batch system) is an interruption like Ctrl-C: threads end, finished results are kept."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def prepare_allocator() -> None:
    """Give large temporaries back as soon as they are free, and keep small ones in two heaps.

    glibc by itself raises the size from which it does so to that of the largest temporary freed, so that a prefill's activations stay: 8 %
    over the planned peak of a run within 1 GiB, where these settings kept it within the plan and cost no time (docs/log.md). Without effect
    where glibc is absent.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)
    mallopt(_M_ARENA_MAX, 2)
