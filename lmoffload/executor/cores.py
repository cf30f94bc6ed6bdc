"""Which cores threads are bound to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def cores_of(groups: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """A core of its own for every thread, those of a group within one NUMA node where one has so many left; none where there are fewer
    cores than threads: they share them as the system sees fit.

    Args:
        groups: threads of each, the one that gains most from one node's memory first.
        nodes: the cores of each node.
    """
    left = [list(node) for node in nodes]
    if sum(groups) > sum(map(len, left)):
        return [()] * len(groups)
    found = []
    for wanted in groups:
        roomy = min((node for node in left if len(node) >= wanted), key=len, default=None)
        found.append(tuple(_take(left if roomy is None else [roomy], wanted)))
    return found


def nodes_here(root: Path = Path("/")) -> list[list[int]]:
    """Cores that this process may use, by NUMA node, one number for each physical core."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    physical = [core for core in allowed if core == min(_listed(root, f"cpu/cpu{core}/topology/thread_siblings_list") or [core])]
    nodes = [_listed(root, f"node/{place.name}/cpulist") for place in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))]
    split = [[core for core in physical if core in node] for node in nodes]
    return [node for node in split if node] or [physical or allowed]


def _take(nodes: Sequence[list[int]], wanted: int) -> list[int]:
    taken: list[int] = []
    for node in nodes:
        while node and len(taken) < wanted:
            taken.append(node.pop(0))
    return taken


def _listed(root: Path, name: str) -> list[int]:
    """Numbers of a list of the kernel's, such as 0-3,8; none where it is not there."""
    numbers: list[int] = []
    with suppress(OSError, ValueError):
        for part in (root / "sys/devices/system" / name).read_text().strip().split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers
