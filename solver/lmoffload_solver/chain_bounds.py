"""Closed-form bounds of a candidate's job time, taken of the whole domain before any program is solved."""

from __future__ import annotations

from lmoffload_solver.chain_terms import ChainTerms, StepTerms
from lmoffload_solver.value import Tier

SHARES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Values of λ by which the closed form weighs the rows of two resources."""


def closed_form_s(
    terms: ChainTerms,
    packed: tuple[float, ...],
    weights: float,
    kv_bytes: float,
    rooms: dict[Tier, float],
    steps: tuple[StepTerms, ...],
    hidden: bool,
) -> float:
    """Seconds that no placement goes below: in each step the largest of

    the device's work without attention, and a micro-batch's own way through device and host;
    λ times the rows `device` of the program and 1 − λ times the rows `upload`, for several λ, each minimised by hand: keys and values
    go where they cost least, and the device's room is filled with what saves most per byte;
    what must come from disk, rooms of device and host filled."""
    up_rate, read_rate = terms.upload_rate, terms.costs.read_rate
    slow = terms.contention
    beside = slow.compute * (1 - 1 / slow.read)
    room = max(0.0, rooms["device"])
    excess = max(0.0, weights + kv_bytes - room - max(0.0, rooms["host"]))
    total = 0.0
    for step, packed_s in zip(steps, packed, strict=True):
        work = step.device + packed_s
        on_device, on_host, carried = step.attend_device[0], step.attend_host[2], step.upload[1]
        if step.early:
            slack = 4 * max(weights / terms.model.num_layers, 0.0) / up_rate
        else:
            slack = 0.0
        path = (work + min(on_device, on_host)) / step.num_batches if on_host else work / step.num_batches
        bound = max(work, path)
        fixed = weights / up_rate + (step.load_hidden if hidden else 0.0) - slack
        for share in SHARES:
            rest = 1 - share
            off_device = share * on_device + rest * carried
            off_device = min(off_device, rest * beside * on_host) if on_host else off_device
            by_weight, by_kv = rest / up_rate, (off_device - share * on_device) / kv_bytes
            if by_weight >= by_kv:
                first = min(room, weights)
                saved = first * by_weight + min(room - first, kv_bytes) * max(0.0, by_kv)
            else:
                first = min(room, kv_bytes)
                saved = first * by_kv + min(room - first, weights) * by_weight
            bound = max(bound, share * work + rest * fixed + off_device - saved)
        whole = min(step.read[3] / kv_bytes * read_rate if step.read[3] else 0.0, 1.0)
        total += step.weight * max(bound, excess * whole / read_rate - slack * up_rate / read_rate)
    return total
