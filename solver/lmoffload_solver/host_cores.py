"""Host cores: what a number of threads makes of the host's rates, on a machine with a device.

Inter-op: as many micro-batches as wait for the host's attention are attended to at once, each by a stream. Intra-op: a measured curve says
what a stream of a threads does. A stream stays within one NUMA node, and a second hardware thread of a core counts for nothing. The
interpreter that launches and the thread that issues copies have a core each; the rest is shared between reading the disk and attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean

from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.lengths import Amount
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.threads import NEAR_BEST
from lmoffload_solver.value import TaskClass

SERIAL_SHARE = 0.03
"""Part of a class of tasks that more threads do not speed up, where no curve was measured (Amdahl's law)."""


@dataclass(frozen=True)
class Speedup:
    """Speed of t threads over that of one: measured points, linear between them and flat beyond; or Amdahl's law."""

    points: Mapping[int, float] | None = None

    def at(self, threads: int) -> float:
        """The speed-up."""
        if self.points is None:
            return 1 / (SERIAL_SHARE + (1 - SERIAL_SHARE) / threads)
        known = sorted(self.points.items())
        if threads <= known[0][0]:
            return known[0][1]
        for (before, slow), (after, fast) in pairwise(known):
            if threads <= after:
                return slow + (fast - slow) * (threads - before) / (after - before)
        return known[-1][1]


@dataclass(frozen=True)
class HostShare:
    """What a plan's threads leave of the profile's rates."""

    attention: Amount = 1.0
    """Rate of attending and dequantizing on the host, over that of all cores."""
    read_bytes_per_s: float | None = None
    """Most that the threads of the disk read; None: what the disk gives."""
    compute_threads: int = 1
    """Of a device that computes on the host's cores."""
    attention_threads: int = 1
    """Of the host's attention on such a machine."""
    crowding: float = 1.0
    """There, threads of both over cores: how much they slow each other."""
    among_devices: float = 1.0
    """There, how many times as long several devices take that all compute at once."""


@dataclass(frozen=True)
class HostCores:
    """The cores that threads may use."""

    cores: int
    """Physical ones."""
    per_node: int
    """Of one NUMA node."""
    attention: Speedup
    reading: Mapping[int, float]
    """Bytes per second by requests in flight, fewest first, each number faster than those before."""
    all_cores: float
    """Speed of attention with all cores of the machine, as the profile's rates were taken."""
    device_threads: tuple[int, ...] = ()
    """What a device that computes on these cores may have of them, as measured; empty where it has its own."""
    device_speed: Speedup = Speedup()
    """Of products there."""
    num_devices: int = 1

    @staticmethod
    def of(machine: MachineProfile, disk: Disk, threads: int | None = None) -> HostCores:
        """Those of a machine, at most `threads`."""
        (host, *_) = [p for p in machine.processors if p.tier == "host"]
        nodes = host.numa_nodes or 1
        whole = max(1, min(machine.host.cores, host.cores) // (host.threads_per_core or 1))
        granted = whole if threads is None else max(1, min(threads, whole))
        per_node = max(1, whole // nodes)
        measured: dict[int, float] = {}
        for curve in machine.attention:
            if curve.phase == "decode":
                measured[curve.threads] = max(measured.get(curve.threads, 0.0), *curve.rate.y)
        fewest = min(measured, default=1)
        device_threads = _device_threads(machine, granted)
        attention = Speedup({n: rate / measured[fewest] for n, rate in measured.items()} if len(measured) > 1 else None)
        reading: dict[int, float] = {}
        for read in sorted(disk.read, key=lambda curve: curve.threads):
            rate = max(read.bytes_per_s.y)
            if rate > max(reading.values(), default=0.0):
                reading[read.threads] = rate
        count = 1 if machine.accelerator is None else machine.accelerator.count
        return HostCores(granted, per_node, attention, reading, attention.at(whole), device_threads, _product_speed(machine), count)

    def streams(self, threads: int, most_streams: int) -> tuple[int, int]:
        """(streams, threads of each) that make most of `threads`; of equals the fewest streams."""
        choices = [(count, threads // count) for count in range(1, min(threads, most_streams) + 1)]
        choices = [(count, min(each, self.per_node)) for count, each in choices]
        return max(choices, key=lambda choice: (round(choice[0] * self.attention.at(choice[1]), 12), -choice[0]))

    def attention_share(self, threads: int, most_streams: int) -> float:
        """Rate of attention over the profile's. No more than 1: what all cores reach is what memory gives."""
        count, each = self.streams(threads, most_streams)
        return min(1.0, count * self.attention.at(each) / self.all_cores)

    def assignments(self) -> Iterator[dict[TaskClass, int]]:
        """Threads of every class of tasks that no other assignment beats for all plans: the disk is read by none or by a number that was
        measured, attention has the rest. With fewer cores than classes each has one thread, and they share the cores."""
        if self.device_threads:
            yield from self._shared_with_device()
            return
        fixed: dict[TaskClass, int] = {"compute": 1, "staging": 1}
        yield {**fixed, "host_attention": max(1, self.cores - 2)}
        for count in self.reading:
            if count == min(self.reading) or count + 3 <= self.cores:
                yield {**fixed, "disk_io": count, "host_attention": max(1, self.cores - 2 - count)}

    def _shared_with_device(self) -> Iterator[dict[TaskClass, int]]:
        """The device and the host's attention have any numbers of threads that were measured; together they may have more than there are
        cores, and then slow each other while both work. Those of the disk and of copies sleep most of the time."""
        best = max(self.reading.values(), default=0.0)
        reading = next((count for count, rate in self.reading.items() if rate >= NEAR_BEST * best), 1)
        for computing, attending in product(self.device_threads, repeat=2):
            yield {"compute": computing, "host_attention": attending, "disk_io": reading, "staging": 1}

    def share(self, threads: Mapping[TaskClass, int], most_streams: int) -> HostShare:
        """What an assignment leaves of the rates."""
        if self.device_threads:
            computing, attending = threads["compute"], threads["host_attention"]
            reads = max((rate for count, rate in self.reading.items() if count <= threads["disk_io"]), default=0.0)
            all_devices = self.num_devices * computing
            among = self.num_devices * self.device_speed.at(computing) / self.device_speed.at(min(all_devices, max(computing, self.cores)))
            crowding = max(1.0, (all_devices + attending) / self.cores)
            return HostShare(1.0, reads, computing, attending, crowding, max(1.0, among))
        attention = self.attention_share(threads["host_attention"], most_streams)
        classes = sum(threads.values())
        crowded = min(1.0, self.cores / classes)
        reading = [rate for count, rate in self.reading.items() if count <= threads.get("disk_io", 0)]
        return HostShare(attention * crowded, max(reading, default=0.0))


def _product_speed(machine: MachineProfile) -> Speedup:
    """Of products with few rows and with many, the mean over all that were measured with every number of threads."""
    rates: dict[int, dict[tuple[str, str, int, int], tuple[float, float]]] = {}
    for curve in machine.linear:
        of = rates.setdefault(curve.threads, {})
        of[curve.kernel, curve.format, curve.n, curve.k] = curve.flops_per_s.y[0], curve.flops_per_s.y[-1]
    alike = set.intersection(*(set(one) for one in rates.values())) if rates else set()
    if len(rates) < 2 or not alike:
        return Speedup({1: 1.0}) if len(rates) == 1 else Speedup()
    one = rates[min(rates)]
    return Speedup({
        threads: fmean(fast / slow for key in alike for fast, slow in zip(of[key], one[key], strict=True)) for threads, of in rates.items()
    })


def _device_threads(machine: MachineProfile, cores: int) -> tuple[int, ...]:
    if not isinstance(machine.accelerator, EmulatedDevice):
        return ()
    measured = {curve.threads for curve in machine.linear} & {curve.threads for curve in machine.attention}
    return tuple(sorted(count for count in measured if count <= cores)) or (min(measured),)
