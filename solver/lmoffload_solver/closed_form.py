"""The linear program solved by hand: seconds that streaming the least bytes does not go below, for fixed discrete choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmoffload_solver.costs import Contention
from lmoffload_solver.counting import Array


@dataclass(frozen=True)
class StepSums:
    """Seconds of computing in the sampled steps of all different blocks, one row for each."""

    weight: Array
    """Steps of the job that each stands for."""
    compute: Array
    early: Array
    """1 where units in the ring buffers may have been read before the step begins, while a longer step computed; else 0."""
    layer: Array
    """The quickest layer; 0 where layers are cut."""
    load: Array
    """Loading of keys and values on the disk, at least."""
    store: Array
    """Storing of them, at least."""


def streaming_bound_s(
    sums: StepSums, slow: Contention, read_bytes_per_s: float, largest_unit: float, head_bytes: float, depths: Array, streamed: Array
) -> Array:
    """Seconds of the job that streaming so many bytes per step does not go below, for each pair of prefetch depth and bytes."""
    early = (depths + 1) * (largest_unit / read_bytes_per_s)
    layers = np.maximum(0.0, streamed - head_bytes) / largest_unit
    return reading_bound_s(sums, slow, depths, streamed / read_bytes_per_s, early, layers)


def reading_bound_s(sums: StepSums, slow: Contention, depths: Array, read_s: Array, early_s: Array, layers: Array) -> Array:
    """Seconds of the job that so many seconds of reading a step do not go below, for each prefetch depth: the rows of `program.Program`.

    Args:
        early_s: reading that the ring buffers may have taken in before a step begins.
        layers: layers that stream, at least.
    """
    reading = read_s[:, None] - early_s[:, None] * sums.early
    both = reading + sums.load
    slowed = both + sums.compute * (slow.compute * (1 - 1 / slow.read)), sums.compute + both * (slow.read * (1 - 1 / slow.compute))
    ahead = np.maximum(*slowed)
    serial = np.maximum(both, reading + layers[:, None] * sums.layer)
    overlapped = np.maximum(serial, ahead) if sums.load.any() else serial
    computing = np.maximum(sums.compute, sums.store)
    return np.asarray(np.maximum(computing, np.where((depths > 0)[:, None], ahead, overlapped)) @ sums.weight)


def least_streamed(total: float, head: float, units: int, room: float, depths: Array) -> Array:
    """Q, the least bytes that stream, for each depth; infinite where even a full stream does not fit.

    Reading is the same for all steps, so the least streamed bytes are best: total − Q bytes stay at home and the ring takes
    (depth + 1)·(Q − head)/(units of all layers), within the room."""
    excess = total - room
    if excess <= 0:
        return np.zeros(len(depths))
    if excess <= head:
        return np.full(len(depths), excess)
    share = (depths + 1) / units
    with np.errstate(divide="ignore", invalid="ignore"):
        streamed = np.where(share < 1, (excess - share * head) / (1 - share), np.inf)
    return np.asarray(np.where(streamed <= total, streamed, np.inf))
