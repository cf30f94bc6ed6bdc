"""Thread-level parallelism control: how the host's cores are shared among concurrent classes of tasks.

Inter-op: the operator graph of the compute task, cut into topological levels, says how many operators can run at once. Intra-op: a measured
curve says what a stream of a threads does. With C cores, p streams of a threads each, and the threads of input/output, staging and
quantizing stay within C; the assignment that makes the slowest class of tasks quickest is found by looking at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lmoffload_solver.chain_predict import ChainSimulated
from lmoffload_solver.decision import Decision
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.value import TaskClass, Value

SERIAL_SHARE = 0.03
"""Part of a class of tasks that more threads do not speed up, where no curve was measured (Amdahl's law)."""


class CoreWork(Value):
    """What the host's cores have to do in a step."""

    seconds: dict[TaskClass, float]
    """Of each class of tasks with one thread."""
    most_streams: int = 1
    """Operators of the compute task that can run at once."""


class CoreSplit(Value):
    """An assignment, and what it makes of the slowest class."""

    streams: int
    """Operators of the compute task that run at once."""
    threads: dict[TaskClass, int]
    """Of one stream for the host's attention, the class that has streams."""
    slowest_s: float

    def totals(self) -> dict[TaskClass, int]:
        """Threads of every class, all its streams together."""
        return {name: count * (self.streams if name == "host_attention" else 1) for name, count in self.threads.items()}


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


def levels_of(depends_on: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The operators of a graph by topological level: those of a level can run at once.

    Raises:
        ValueError: the graph has a cycle.
    """
    left = {name: set(needed) for name, needed in depends_on.items()}
    levels: list[list[str]] = []
    done: set[str] = set()
    while left:
        ready = sorted(name for name, needed in left.items() if needed <= done)
        if not ready:
            raise ValueError("the operators depend on each other in a circle")
        levels.append(ready)
        done |= set(ready)
        left = {name: needed for name, needed in left.items() if name not in done}
    return levels


def attention_graph(num_batches: int) -> dict[str, list[str]]:
    """Operators of the host's attention over the micro-batches of a layer: each one's scores, softmax and weighted sum."""
    graph: dict[str, list[str]] = {}
    for batch in range(num_batches):
        graph |= {f"{batch}.scores": [], f"{batch}.softmax": [f"{batch}.scores"], f"{batch}.values": [f"{batch}.softmax"]}
    return graph


def widest_level(depends_on: Mapping[str, Sequence[str]]) -> int:
    """Operators that can run at once."""
    return max(map(len, levels_of(depends_on)), default=1)


def splits(work: CoreWork, cores: int) -> Iterator[tuple[int, dict[TaskClass, int]]]:
    """Every assignment of at least one thread to each class that has work, within the cores; (streams, threads of each)."""
    classes = [name for name, seconds in work.seconds.items() if seconds > 0]
    streamed: TaskClass | None = "host_attention" if "host_attention" in classes else None
    for streams in range(1, max(1, work.most_streams) + 1 if streamed else 2):
        yield from ((streams, chosen) for chosen in _shared(classes, cores, streamed, streams))


def _shared(classes: Sequence[TaskClass], cores: int, streamed: TaskClass | None, streams: int) -> Iterator[dict[TaskClass, int]]:
    if not classes:
        yield {}
        return
    first, rest = classes[0], classes[1:]
    times = streams if first == streamed else 1
    for threads in range(1, cores // times + 1):
        for others in _shared(rest, cores - threads * times, streamed, streams):
            yield {first: threads, **others}


def slowest_s(work: CoreWork, speedups: Mapping[TaskClass, Speedup], streams: int, threads: Mapping[TaskClass, int]) -> float:
    """Seconds of the slowest class: its work over the speed of its threads; p streams of a threads do p times what one does."""
    times = {name: streams if name == "host_attention" else 1 for name in threads}
    return max((work.seconds[n] / (times[n] * speedups.get(n, Speedup()).at(count)) for n, count in threads.items()), default=0.0)


def best_split(work: CoreWork, speedups: Mapping[TaskClass, Speedup], cores: int) -> CoreSplit:
    """The assignment with the quickest slowest class; of equals the one with fewest threads. With fewer cores than classes the classes
    share them, one thread each."""
    best: tuple[float, int, int, dict[TaskClass, int]] | None = None
    for streams, threads in splits(work, cores):
        total = sum(threads.values())
        found = (slowest_s(work, speedups, streams, threads), total, streams, threads)
        if best is None or found[:3] < best[:3]:
            best = found
    if best is None:
        threads = {name: 1 for name, seconds in work.seconds.items() if seconds > 0}
        return CoreSplit(streams=1, threads=threads, slowest_s=slowest_s(work, speedups, 1, threads) * len(threads) / max(1, cores))
    return CoreSplit(streams=best[2], threads=best[3], slowest_s=best[0])


def default_split(work: CoreWork, speedups: Mapping[TaskClass, Speedup], cores: int) -> CoreSplit:
    """What the libraries' defaults give: every class takes all cores, and they are slowed as they share them."""
    threads = {name: cores for name, seconds in work.seconds.items() if seconds > 0}
    alone = {name: work.seconds[name] / speedups.get(name, Speedup()).at(cores) for name in threads}
    return CoreSplit(streams=1, threads=threads, slowest_s=sum(alone.values()))


def physical_cores(machine: MachineProfile) -> int:
    """Cores of one NUMA node that threads may use; a second hardware thread of a core counts for nothing."""
    (host, *_) = [p for p in machine.processors if p.tier == "host"]
    nodes = host.numa_nodes or 1
    return max(1, min(machine.host.cores, host.cores) // (host.threads_per_core or 1) // nodes * nodes)


def work_of(machine: MachineProfile, decision: Decision, simulated: ChainSimulated) -> CoreWork:
    """What the host's cores do in a job with a device: the interpreter that launches, attention, requests to the disk.

    The profile's rates of the host's attention are those of all its cores; one thread's seconds follow by the speed-up.
    """
    busy = {name: simulated.prefill.busy.get(name, 0.0) + simulated.decode.busy.get(name, 0.0) for name in ("host_attention", "disk_read")}
    cores = physical_cores(machine)
    attended = busy["host_attention"] * Speedup().at(cores)
    launching = machine.overheads.layer_s * len(decision.kv) * decision.num_micro_batches
    quantizing = attended * 0.5 if decision.kv_format in QUANTIZED else 0.0
    seconds: dict[TaskClass, float] = {
        "compute": launching,
        "host_attention": attended - quantizing,
        "quantize": quantizing,
        "disk_io": busy["disk_read"],
    }
    return CoreWork(seconds=seconds, most_streams=widest_level(attention_graph(decision.num_micro_batches)))


def split_of(machine: MachineProfile, decision: Decision, simulated: ChainSimulated) -> CoreSplit:
    """The best assignment of the host's cores for a plan with a device."""
    return best_split(work_of(machine, decision, simulated), speedups_of(machine), physical_cores(machine))


def speedups_of(machine: MachineProfile) -> dict[TaskClass, Speedup]:
    """Measured speed-ups: the interpreter has none; those of the disk are its curves by requests in flight."""
    read = {curve.threads: max(curve.bytes_per_s.y) for curve in machine.disks[0].read}
    fewest = min(read)
    return {"compute": Speedup({1: 1.0}), "disk_io": Speedup({threads: rate / read[fewest] for threads, rate in read.items()})}
