"""Thread-level parallelism: how the cores are shared among concurrent classes of tasks. First form: compute and disk reads.

I/O threads sleep in the kernel while the disk works, so that they take no core from the compute threads; what they cost in memory bandwidth
and copying is the measured contention.
"""

from __future__ import annotations

from lmoffload_solver.costs import rate_at
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.schedule import READ_REQUEST_BYTES

NEAR_BEST = 0.97
"""The smallest number of requests in flight that reaches this share of the best measured rate is used."""


def compute_choices(machine: MachineProfile, formats: frozenset[str], cores: int) -> tuple[int, ...]:
    """Numbers of compute threads that were measured for every stored format and fit the cores, ascending.

    Raises:
        StatedError: there is none.
    """
    measured: dict[int, set[str]] = {}
    for curve in machine.linear:
        measured.setdefault(curve.threads, set()).add(curve.format)
    choices = tuple(sorted(threads for threads, known in measured.items() if formats <= known and threads <= cores))
    if not choices:
        missing = formats - {curve.format for curve in machine.linear}
        what = f"the format {sorted(missing)[0]}" if missing else f"{', '.join(sorted(formats))} with at most {cores} threads"
        raise StatedError(f"The machine profile {machine.name!r} has no linear layer measured for {what}; run `lmoffload profile` again.")
    return choices


def disk_threads(disk: Disk) -> int:
    """Requests in flight for reading: the fewest whose rate at the request size used is within 3 % of the best measured.

    Raises:
        StatedError: no reads were measured.
    """
    if not disk.read:
        raise StatedError(f"The machine profile has no reads measured for the disk at {disk.file_system}; run `lmoffload profile` again.")
    rates = {curve.threads: float(rate_at(curve.bytes_per_s, READ_REQUEST_BYTES)) for curve in disk.read}
    best = max(rates.values())
    return min(threads for threads, rate in rates.items() if rate >= NEAR_BEST * best)
