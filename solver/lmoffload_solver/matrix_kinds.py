"""Kinds of matrices of the layers: those of one kind are read, kept and computed alike, wherever they stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.closed_form import Head, Layers
from lmoffload_solver.costs import num_requests
from lmoffload_solver.counting import Array
from lmoffload_solver.model import ModelShape
from lmoffload_solver.prices import Prices
from lmoffload_solver.rounding import Stream
from lmoffload_solver.schedule import aligned_bytes, largest_read
from lmoffload_solver.value import TensorClass

MOST_SETS = 4096
"""Above this many sets of a layer's matrices any size is taken for possible."""


@dataclass(frozen=True)
class MatrixKind:
    """Matrices of one class, shape and format."""

    tensor_class: TensorClass
    stored: int
    """Bytes of one."""
    aligned: int
    """Bytes that one takes in memory."""
    requests: int
    """In which one is read."""
    count: int
    layer: int
    """A layer that has one."""
    place: int
    """Its place among the layer's matrices."""


@dataclass(frozen=True)
class LargestLayer:
    """The largest of a model's layers."""

    num_layers: int
    stored: int
    """Its bytes."""
    aligned: int
    """The same in memory."""
    alike: bool
    """Whether all are."""


def kinds_of(model: ModelShape) -> tuple[MatrixKind, ...]:
    """The kinds of a model's matrices, in order of their first."""
    found: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for layer in range(model.num_layers):
        for place, tensor in enumerate(counting.layer_matrices(model, layer)):
            found.setdefault((tensor.tensor_class, tensor.shape, tensor.format, tensor.num_runs), []).append((layer, place))
    kinds = []
    for places in found.values():
        layer, place = places[0]
        tensor = counting.layer_matrices(model, layer)[place]
        stored = counting.tensor_bytes(tensor)
        aligned = aligned_bytes(stored, tensor.num_runs)
        kinds.append(MatrixKind(tensor.tensor_class, stored, aligned, num_requests([stored]), len(places), layer, place))
    return tuple(kinds)


def layers_alike(model: ModelShape) -> bool:
    """Whether all layers have the same matrices."""
    layers = (counting.layer_matrices(model, layer) for layer in range(model.num_layers))
    return len({tuple((t.shape, t.format, t.num_runs) for t in of_layer) for of_layer in layers}) == 1


@dataclass(frozen=True)
class Streaming:
    """What streaming frees in memory and takes to read."""

    layers: Layers
    head: Head
    one_s: tuple[float, ...]
    """Reading one matrix, by kind."""


def streaming_of(kinds: Sequence[MatrixKind], stream: Stream, largest: LargestLayer, head_bytes: int, prices: Prices) -> Streaming:
    """What streams matrix by matrix, or layers whole, no quicker than such reads can be."""
    matrix = max(kind.stored for kind in kinds)
    unit = matrix if stream == "matrix" else largest.stored
    if stream == "matrix":
        one_s = [prices.read_seconds(kind.stored, kind.requests) for kind in kinds]
    else:
        per_byte = prices.disk.least_s_per_byte(max(kind.stored / kind.requests for kind in kinds), unit)
        one_s = [kind.stored * per_byte for kind in kinds]
    each = [seconds / kind.aligned for seconds, kind in zip(one_s, kinds, strict=True)]
    num_bytes = float(sum(kind.aligned * kind.count for kind in kinds))
    all_s = sum(seconds * kind.count for seconds, kind in zip(one_s, kinds, strict=True))
    unit_s = max(one_s) if stream == "matrix" else unit * per_byte
    buffers = _matrices(kinds) if stream == "matrix" else _sets(kinds, largest)
    layers = Layers(largest.num_layers, num_bytes, float(largest.aligned), stream == "matrix", buffers, all_s, min(each), max(each), unit_s)
    piece = largest_read(unit, head_bytes)
    head_s = head_bytes * prices.disk.least_s_per_byte(piece, piece)
    head = Head(float(aligned_bytes(head_bytes)), head_s, min(piece, head_bytes) / head_bytes * head_s)
    return Streaming(layers, head, tuple(one_s))


def _matrices(kinds: Sequence[MatrixKind]) -> tuple[Array, Array]:
    """Sizes of matrices, and the bytes of all that are no larger."""
    sizes = sorted({kind.aligned for kind in kinds})
    within = [sum(kind.aligned * kind.count for kind in kinds if kind.aligned <= size) for size in sizes]
    return np.array(sizes, dtype=float), np.array(within, dtype=float)


def _sets(kinds: Sequence[MatrixKind], largest: LargestLayer) -> tuple[Array, Array]:
    """Sizes of sets of a layer's matrices, and the bytes of all layers with it; none where layers differ, or are of many matrices."""
    of_layer = [(kind.aligned, kind.count // largest.num_layers) for kind in kinds]
    if not largest.alike or math.prod(count + 1 for _, count in of_layer) > MOST_SETS:
        return np.zeros(0), np.zeros(0)
    all_counts = product(*(range(count + 1) for _, count in of_layer))
    sums = {sum(size * chosen for (size, _), chosen in zip(of_layer, counts, strict=True)) for counts in all_counts}
    sizes = np.array(sorted(sums - {0}), dtype=float)
    return sizes, sizes * largest.num_layers
