"""Cores shared: every assignment that is not among those searched is beaten by one that is; streams, NUMA nodes, hardware threads."""

from __future__ import annotations

import itertools

import pytest

from lmoffload_solver.core_split import attention_graph, levels_of, widest_level
from lmoffload_solver.host_cores import HostCores, Speedup
from tests.solver.device_toys import make_device_machine


def test_levels_of_a_graph() -> None:
    assert levels_of({"q": [], "k": [], "scores": ["q", "k"], "out": ["scores"]}) == [["k", "q"], ["scores"], ["out"]]
    assert widest_level(attention_graph(5)) == 5
    with pytest.raises(ValueError, match="circle"):
        levels_of({"a": ["b"], "b": ["a"]})


def test_speedups() -> None:
    measured = Speedup({1: 1.0, 4: 3.0})
    assert [measured.at(n) for n in (1, 2, 4, 9)] == pytest.approx([1, 1 + 2 / 3, 3, 3])
    assert Speedup().at(1) == pytest.approx(1)


def test_streams_beat_threads_where_a_stream_does_not_scale() -> None:
    """A stream is 1.5 times as fast with 2 threads and no faster with more: six streams of one thread do 6 times the work."""
    cores = HostCores(8, 8, Speedup({1: 1.0, 2: 1.5, 8: 1.5}), {1: 1e9}, 1.5)
    assert cores.streams(6, 6) == (6, 1)
    assert cores.streams(6, 1) == (1, 6)
    assert cores.attention_share(6, 6) == 1.0, "never more than all cores were measured to reach"
    slow = HostCores(8, 8, Speedup(), {1: 1e9}, Speedup().at(8))
    assert slow.attention_share(1, 1) == pytest.approx(1 / Speedup().at(8))


def test_nodes_and_hardware_threads() -> None:
    """16 hardware threads of 8 cores on 2 nodes: a stream has at most 4 threads."""
    machine = make_device_machine(cores=16)
    (processor,) = machine.processors
    processors = (processor.model_copy(update={"threads_per_core": 2, "numa_nodes": 2}),)
    split = machine.model_copy(update={"processors": processors, "attention": ()})
    cores = HostCores.of(split, split.disks[0])
    assert (cores.cores, cores.per_node) == (8, 4)
    assert cores.streams(8, 1) == (1, 4)
    assert cores.streams(8, 2) == (2, 4)
    assert cores.attention_share(8, 1) < cores.attention_share(8, 2)
    assert HostCores.of(split, split.disks[0], 3).cores == 3


@pytest.mark.parametrize("cores", [1, 2, 4, 6, 9])
@pytest.mark.parametrize("streams", [1, 3])
def test_every_assignment_is_beaten_by_one_that_is_searched(cores: int, streams: int) -> None:
    """Each class at least one thread, all within the cores: what a plan can get of reading and attention is among the assignments."""
    machine = make_device_machine(cores=16)
    host = HostCores.of(machine, machine.disks[0], cores)
    searched = [host.share(one, streams) for one in host.assignments()]
    for one in host.assignments():
        if cores >= len(one):
            assert sum(one.values()) <= cores
    for reading, attention in itertools.product(range(cores + 1), range(1, cores + 1)):
        if 2 + reading + attention <= cores:
            share = host.share({"compute": 1, "staging": 1, "host_attention": attention, "disk_io": reading}, streams)
            assert any(
                s.attention >= share.attention - 1e-12 and (s.read_bytes_per_s or 0) >= (share.read_bytes_per_s or 0) for s in searched
            )


def test_more_cores_are_never_slower() -> None:
    machine = make_device_machine(cores=16)
    for streams in (1, 4):
        best = [0.0, 0.0]
        for cores in range(1, 17):
            host = HostCores.of(machine, machine.disks[0], cores)
            shares = [host.share(one, streams) for one in host.assignments()]
            now = [max(s.attention for s in shares), max(s.read_bytes_per_s or 0.0 for s in shares)]
            assert all(after >= before - 1e-12 for before, after in zip(best, now, strict=True))
            best = now
