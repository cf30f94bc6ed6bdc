"""Closed-form bounds of the job's time, taken of the whole domain before any program is solved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmoffload_solver.chain_terms import Array, ChainTerms, StepTerms

SHARES = np.array([0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0])[:, None, None]
"""Values of λ by which the closed form weighs the rows of two resources."""


@dataclass(frozen=True)
class Amounts:
    """Bytes, by format of the weights (rows) and batch of the domain (columns)."""

    weights: Array
    largest: Array
    """Of a layer, the mean, or the head."""
    kv: Array
    device: Array
    """Room on the device."""
    host: Array
    granted: Array
    """Room for weights on device and host together."""


def closed_form_s(
    terms: ChainTerms, steps: StepTerms, packed: Array, amounts: Amounts, *, depth: int, hidden: bool, read_rate: float
) -> Array:
    """Seconds that no placement goes below, formats × batches: in each step the largest of

    the device's work without attention, and a micro-batch's own way through device and host;
    λ times the rows `device` of the program and 1 − λ times the rows `upload`, for several λ, each minimised by hand: keys and values
    go where they cost least, and the device's room is filled with what saves most per byte;
    what must come from disk, rooms of device and host filled.

    Args:
        packed: formats × steps × blocks.
        depth: the largest prefetch depth.
        read_rate: bytes per second; 0 where nothing may be read.
    """
    counts = np.diff([*terms.starts, steps.weight.shape[1]])
    weights, kv, device, host, largest = (
        np.repeat(values, counts, axis=1) for values in (amounts.weights, amounts.kv, amounts.device, amounts.host, amounts.largest)
    )
    excess = np.maximum(0.0, weights + kv - device - host)
    too_many = np.maximum(0.0, weights - np.repeat(amounts.granted, counts, axis=1))
    total = np.zeros_like(weights)
    for row in range(steps.weight.shape[0]):
        work = steps.device[row] + packed[:, row]
        slack = (depth + 2) * largest if steps.early[row, 0] else np.zeros_like(largest)
        by_two = _two_resources_s(terms, steps, row, work, weights, kv, device, slack, hidden)
        bound = np.maximum(by_two, _path_s(steps, row, work, packed[:, row]))
        if read_rate:
            whole = np.minimum(steps.read[row, :, 3] / kv * read_rate, 1.0)
            bound = np.maximum(bound, (np.maximum(excess * whole, too_many) - slack) / read_rate)
        total += steps.weight[row] * bound
    return np.asarray(np.add.reduceat(total, terms.starts, axis=1))


def _path_s(steps: StepTerms, row: int, work: Array, packed: Array) -> Array:
    """A micro-batch's own way through device and host, with what dequantizing in the products saves it."""
    attend = np.minimum(steps.attend_device[row, :, 0], steps.attend_device[row, :, 2] + steps.attend_host[row, :, 2])
    return np.asarray(np.maximum(work, (steps.device[row] + np.minimum(packed, 0.0) + attend) / steps.num_batches[row]))


def _two_resources_s(
    terms: ChainTerms, steps: StepTerms, row: int, work: Array, weights: Array, kv: Array, room: Array, slack: Array, hidden: bool
) -> Array:
    slow = terms.contention
    beside = slow.compute * (1 - 1 / slow.read)
    rest = 1 - SHARES
    on_device = SHARES * steps.attend_device[row, :, 0]
    on_host = SHARES * steps.attend_device[row, :, 2] + rest * beside * steps.attend_host[row, :, 2]
    away = np.minimum(SHARES * steps.attend_device[row, :, 1] + rest * steps.upload[row, :, 1], on_host)
    by_weight, by_kv = rest / terms.upload_rate, (away - on_device) / kv
    most_weights, most_kv = np.minimum(room, weights), np.minimum(room, kv)
    weights_first = most_weights * by_weight + np.minimum(room - most_weights, kv) * np.maximum(0.0, by_kv)
    kv_first = most_kv * by_kv + np.minimum(room - most_kv, weights) * by_weight
    saved = np.where(by_weight >= by_kv, weights_first, kv_first)
    fixed = (weights - slack) / terms.upload_rate + (steps.load_hidden[row] if hidden else 0.0)
    return np.asarray((SHARES * work + rest * fixed + away - saved).max(axis=0))
