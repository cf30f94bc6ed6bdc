"""Thread-level parallelism control, told: how a plan shares the host's cores among classes of tasks, beside what the libraries would do.

Inter-op: the operator graph of the host's attention, cut into topological levels, says how many operators can run at once. Intra-op:
measured curves say what a stream of some threads does (`host_cores`). The search chooses the assignment, since it changes the plan's times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmoffload_solver.chain_predict import ChainSimulated
from lmoffload_solver.decision import Decision
from lmoffload_solver.host_cores import HostCores, Speedup
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.value import TaskClass, Value


class CoreWork(Value):
    """What the host's cores have to do in a job."""

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


def layer_graph() -> dict[str, list[str]]:
    """Operators of a decoder layer that computes on the host, norms and additions left out."""
    return {
        "query": [], "key": [], "value": [], "attention": ["query", "key", "value"], "output": ["attention"],
        "gate": ["output"], "up": ["output"], "down": ["gate", "up"],
    }  # fmt: skip


def widest_level(depends_on: Mapping[str, Sequence[str]]) -> int:
    """Operators that can run at once."""
    return max(map(len, levels_of(depends_on)), default=1)


def slowest_s(work: CoreWork, speedups: Mapping[TaskClass, Speedup], streams: int, threads: Mapping[TaskClass, int]) -> float:
    """Seconds of the slowest class: its work over the speed of its threads; p streams of a threads do p times what one does."""
    times = {name: streams if name == "host_attention" else 1 for name in threads}
    return max((work.seconds.get(n, 0.0) / (times[n] * speedups[n].at(count)) for n, count in threads.items()), default=0.0)


def default_split(work: CoreWork, speedups: Mapping[TaskClass, Speedup], cores: int) -> CoreSplit:
    """What the libraries' defaults give: every class takes all cores, and they are slowed as they share them."""
    threads = {name: cores for name, seconds in work.seconds.items() if seconds > 0}
    alone = {name: work.seconds[name] / speedups[name].at(cores) for name in threads}
    return CoreSplit(streams=1, threads=threads, slowest_s=sum(alone.values()))


def work_of(machine: MachineProfile, disk: Disk, decision: Decision, simulated: ChainSimulated) -> CoreWork:
    """What the host's cores do in a job with a device: the interpreter that launches, attention with its dequantizing, requests to the
    disk; the seconds of one thread follow from those of the plan by its speed-ups."""
    cores = HostCores.of(machine, disk, decision.most_threads)
    busy = {name: simulated.prefill.busy.get(name, 0.0) + simulated.decode.busy.get(name, 0.0) for name in ("host_attention", "disk_read")}
    speedups = speedups_of(cores)
    launching = machine.overheads.layer_s * len(decision.kv) * decision.num_micro_batches
    if cores.device_threads:
        launching = simulated.prefill.busy.get("device", 0.0) + simulated.decode.busy.get("device", 0.0)
    seconds: dict[TaskClass, float] = {"compute": launching, "host_attention": busy["host_attention"], "disk_io": busy["disk_read"]}
    if decision.threads:
        streams, each = cores.streams(decision.threads["host_attention"], decision.num_micro_batches)
        seconds["host_attention"] *= streams * speedups["host_attention"].at(each)
        seconds["disk_io"] *= speedups["disk_io"].at(decision.threads.get("disk_io", 1))
    else:
        seconds["host_attention"] *= cores.all_cores
    return CoreWork(seconds=seconds, most_streams=widest_level(attention_graph(decision.num_micro_batches)))


def split_of(machine: MachineProfile, disk: Disk, decision: Decision, simulated: ChainSimulated) -> CoreSplit:
    """How a plan shares the host's cores; another system's as its libraries do."""
    cores = HostCores.of(machine, disk, decision.most_threads)
    work, speedups = work_of(machine, disk, decision, simulated), speedups_of(cores)
    if not decision.threads:
        return default_split(work, speedups, cores.cores)
    streams, each = cores.streams(decision.threads["host_attention"], work.most_streams)
    threads = {**decision.threads, "host_attention": each}
    return CoreSplit(streams=streams, threads=threads, slowest_s=slowest_s(work, speedups, streams, threads))


def speedups_of(cores: HostCores) -> dict[TaskClass, Speedup]:
    """By class of tasks: launching and issuing copies have none; those of the disk are its curves by requests in flight."""
    fewest = min(cores.reading)
    one = Speedup({1: 1.0})
    reading = Speedup({threads: rate / cores.reading[fewest] for threads, rate in cores.reading.items()})
    return {"compute": one, "staging": one, "quantize": cores.attention, "host_attention": cores.attention, "disk_io": reading}
