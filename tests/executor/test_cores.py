"""Threads bound to cores."""

from __future__ import annotations

import os

from lmoffload.executor.cores import cores_of, nodes_here


def test_a_core_for_every_thread_and_a_node_for_a_class():
    threads = {"compute": 1, "staging": 1, "disk_io": 2, "host_attention": 4}
    assert cores_of(threads, [[0, 1, 2, 3], [4, 5, 6, 7]]) == {
        "host_attention": (0, 1, 2, 3), "compute": (4,), "staging": (5,), "disk_io": (6, 7),
    }  # fmt: skip
    assert cores_of({**threads, "host_attention": 5}, [[0, 1, 2, 3], [4, 5, 6, 7, 8]])["host_attention"] == (4, 5, 6, 7, 8)
    assert cores_of({**threads, "host_attention": 6}, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])["host_attention"] == (0, 1, 2, 3, 4, 5)


def test_fewer_cores_than_threads_are_shared():
    assert cores_of({"compute": 1, "staging": 1, "disk_io": 1, "host_attention": 1}, [[0, 1]]) == {}


def test_a_core_counts_once_though_it_has_two_threads(tmp_path):
    system = tmp_path / "sys/devices/system"
    allowed = sorted(os.sched_getaffinity(0))
    for core in allowed:
        place = system / f"cpu/cpu{core}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{allowed[0]},{core}\n" if core in allowed[:2] else f"{core}\n")
    for node in (0, 1):
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(",".join(str(core) for core in allowed if core % 2 == node) + "\n")
    physical = [allowed[0], *allowed[2:]]
    assert nodes_here(tmp_path) == [node for node in ([core for core in physical if core % 2 == n] for n in (0, 1)) if node]
    assert nodes_here(tmp_path / "nothing") == [allowed]
