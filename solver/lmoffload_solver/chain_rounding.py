"""From the program's fractions to whole tensors and whole (layer, micro-batch) units of KV, spread evenly over the layers.

All matrices stand in one order whose every beginning is spread evenly over the layers: the first of them lie on the device, the next on
the host, the rest on disk. More memory moves the two cuts on, so what lay on the device stays there. What rounding costs shows as the
difference between the program's value and the simulated time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, floor, sqrt

import numpy as np
import numpy.typing as npt

from lmoffload_solver import counting
from lmoffload_solver.decision import KVUnit
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.schedule import HEAD_PIECE_BYTES
from lmoffload_solver.value import TensorClass, Tier

NEARLY = 1e-6
"""What the solver's tolerance may lack to a whole unit."""

MOST_PLACEMENTS = 3000
"""Up to so many placements of whole tensors and units, every one is looked at instead of those that rounding gives."""

GOLDEN = (sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, cut a circle into gaps of at most three sizes, however many they are (three-distance theorem)."""


class SpreadOrder:
    """The matrices of the layers and the head in an order of which every beginning is spread evenly over the layers."""

    def __init__(
        self, groups: Sequence[Sequence[tuple[int, str]]], head_first: bool, first_whole: bool = False, head_in_pieces: bool = False
    ) -> None:
        """`groups`: (bytes, name) of each layer's matrices, and last of the head. With `first_whole` all of the first layer comes first: it
        is what a job waits for when it begins. A head in pieces moves in such that are no larger than the largest layer's."""
        *layers, head = [sorted(group, reverse=True) for group in groups]
        places = [
            (0 if first_whole and not number else place + 1, (number * GOLDEN) % 1, number, size, name)
            for number, group in enumerate(layers)
            for place, (size, name) in enumerate(group)
        ]
        entries = [(number, size, name) for _, _, number, size, name in sorted(places)]
        entries[0 if head_first else len(entries) : 0] = [(len(layers), size, name) for size, name in head]
        self.names = [name for _, _, name in entries]
        sizes = np.array([size for _, size, _ in entries], dtype=np.int64)
        by_group = np.zeros((len(entries) + 1, len(groups)), dtype=np.int64)
        by_group[np.arange(1, len(entries) + 1), [number for number, _, _ in entries]] = sizes
        placed = np.cumsum(by_group, axis=0)
        self.first_bytes: npt.NDArray[np.int64] = placed.sum(axis=1)
        """Of the first n matrices, for every n."""
        rest = placed[-1] - placed
        if head_in_pieces:
            largest = rest[:, :-1].max(axis=1)
            rest[:, -1] = np.minimum(rest[:, -1], np.where(largest, largest, HEAD_PIECE_BYTES))
        self.largest_rest: npt.NDArray[np.int64] = rest.max(axis=1)
        """Bytes of the layer (or head) with most bytes behind the first n."""


@dataclass(frozen=True)
class Rooms:
    """Bytes for homes and buffers of weights: in each tier, and on device and host together."""

    device: float
    host: float
    disk: float
    weights: float = float("inf")

    def shared(self, share: float) -> Rooms:
        """With a share of what accelerators share."""
        return Rooms(self.device, self.host * share, self.disk * share, self.weights * share)


class WeightPlacer:
    """Places the matrices of a model, or of a stage of a pipeline, kept in some formats."""

    def __init__(
        self,
        model: ModelShape,
        formats: dict[TensorClass, str],
        room_bytes: Callable[[TensorShape, int], int] | None = None,
        head_in_pieces: bool = False,
        tensors: Sequence[Sequence[TensorShape]] | None = None,
    ) -> None:
        """
        Args:
            room_bytes: what a tensor of some bytes takes in memory; those bytes unless given.
            tensors: of a stage, as `ChainMemory.groups_of` gives them; all unless given.
        """
        self._room_bytes, self._head_in_pieces = room_bytes, head_in_pieces
        here = [t for group in tensors for t in group] if tensors is not None else [t for t in model.tensors if t.is_matrix]
        by_layer: dict[int | None, list[tuple[int, str]]] = {}
        for tensor in here:
            if tensor.layer is not None:
                by_layer.setdefault(tensor.layer, []).append((self._size(tensor, formats), tensor.name))
        groups = [by_layer[layer] for layer in range(model.num_layers) if layer in by_layer]
        groups.append([(self._size(model.head, formats), model.head.name)] if model.head in here else [])
        placed = {name for group in groups for _, name in group}
        self.num_bytes = sum(size for group in groups for size, _ in group)
        """Of all that is placed."""
        self.others: dict[str, Tier] = {}
        """Matrices that cost no time wherever they lie: an embedding table of its own stays on the host, small tables on the device."""
        self.other_bytes: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        for tensor in here:
            if tensor.name not in placed:
                tier: Tier = "host" if tensor.name == model.embedding.name else "device"
                self.others[tensor.name] = tier
                self.other_bytes[tier] += self._size(tensor, formats)
        self._groups = groups

    @cached_property
    def orders(self) -> tuple[SpreadOrder, ...]:
        """The head first, and last."""
        return self._orders(False)

    @cached_property
    def first_whole_orders(self) -> tuple[SpreadOrder, ...]:
        """The same with the whole first layer first."""
        return self._orders(True)

    def _orders(self, first_whole: bool) -> tuple[SpreadOrder, ...]:
        return tuple(SpreadOrder(self._groups, head_first, first_whole, self._head_in_pieces) for head_first in (True, False))

    def left_by_others(self, rooms: Rooms) -> Rooms:
        """What the matrices leave that are not placed here."""
        device, host = self.other_bytes["device"], self.other_bytes["host"]
        return Rooms(rooms.device - device, rooms.host - host, rooms.disk, rooms.weights - device - host)

    def fill(self, rooms: Rooms, slots: int, *, first_whole: bool = False) -> Iterator[dict[str, Tier]]:
        """Of each order the most on the device, then on the host, that fits with `slots` buffers of the largest layer's rest."""
        left = self.left_by_others(rooms)
        found: dict[tuple[Tier, ...], None] = {}
        for order in self.first_whole_orders if first_whole else self.orders:
            cuts = _cuts(order, left, slots)
            if cuts is None:
                continue
            on_device, on_host = cuts
            counts: tuple[tuple[Tier, int], ...] = (
                ("device", on_device),
                ("host", on_host - on_device),
                ("disk", len(order.names) - on_host),
            )
            tiers = [tier for tier, count in counts for _ in range(count)]
            homes = {**self.others, **dict(zip(order.names, tiers, strict=True))}
            key = tuple(homes[name] for name in self.orders[0].names)
            if key not in found:
                found[key] = None
                yield homes

    def _size(self, tensor: TensorShape, formats: dict[TensorClass, str]) -> int:
        size = counting.tensor_bytes(tensor, formats.get(tensor.tensor_class))
        return size if self._room_bytes is None else self._room_bytes(tensor, size)


def _cuts(order: SpreadOrder, rooms: Rooms, slots: int) -> tuple[int, int] | None:
    """(matrices on the device, matrices on device or host): the most of the former, then of the latter; None where nothing fits."""
    first, buffers = order.first_bytes, slots * order.largest_rest
    total = first[-1]
    for on_device in np.nonzero(first + buffers <= rooms.device)[0][::-1]:
        on_host = np.nonzero(
            (first - first[on_device] + buffers <= rooms.host)
            & (first + buffers + buffers[on_device] <= rooms.weights)
            & (total - first <= rooms.disk)
        )[0]
        if len(on_host) and on_host[-1] >= on_device:
            return int(on_device), int(on_host[-1])
    return None


def kv_placements(shares: Sequence[float], num_layers: int, num_batches: int) -> Iterator[tuple[tuple[KVUnit, ...], ...]]:
    """Whole units near the program's shares (in the order of `chain_terms.PLACES`): as many as may be on the device, spread over the
    layers; of the others in each layer some attended to by the host, their number tried down and up."""
    total = num_layers * num_batches
    on_device = min(total, floor(shares[0] * total + NEARLY))
    on_disk = min(total - on_device, ceil((shares[3] + shares[4]) * total - NEARLY))
    by_host = (shares[2] + shares[4]) * num_batches
    found: dict[tuple[tuple[KVUnit, ...], ...], None] = {}
    away_most = num_batches - (on_device // num_layers)
    counts = {0, floor(by_host + NEARLY), ceil(by_host - NEARLY), away_most if by_host > NEARLY else 0}
    for attended in sorted(counts):
        if by_host > NEARLY or attended == 0:
            found[spread_kv(num_layers, num_batches, on_device, on_disk, attended)] = None
    yield from found


def every_placement(
    model: ModelShape, num_batches: int, tiers: Sequence[Tier], places: Sequence[KVUnit], others: Mapping[str, Tier]
) -> Iterator[tuple[dict[str, Tier], tuple[tuple[KVUnit, ...], ...]]] | None:
    """Every placement of whole tensors and whole units of KV; None where they are more than `MOST_PLACEMENTS`."""
    names = [t.name for t in model.tensors if t.is_matrix and t.name not in others]
    units = num_batches * model.num_layers
    if len(tiers) ** len(names) * len(places) ** units > MOST_PLACEMENTS:
        return None

    def all_of_them() -> Iterator[tuple[dict[str, Tier], tuple[tuple[KVUnit, ...], ...]]]:
        for homes, kv in product(product(tiers, repeat=len(names)), product(places, repeat=units)):
            layers = tuple(kv[first : first + num_batches] for first in range(0, units, num_batches))
            yield {**others, **dict(zip(names, homes, strict=True))}, layers

    return all_of_them()


def spread_kv(num_layers: int, num_batches: int, on_device: int, on_disk: int, attended: int) -> tuple[tuple[KVUnit, ...], ...]:
    """Units of every layer in the order host-attended, moved, on the device."""
    layers = []
    for layer in range(num_layers):
        device = _share(on_device, layer, num_layers)
        disk = min(_share(on_disk, layer, num_layers), num_batches - device)
        away = num_batches - device
        units = []
        for place in range(away):
            home: Tier = "disk" if place >= away - disk else "host"
            units.append(KVUnit(home, "host" if place < attended else "device"))
        layers.append((*units, *[KVUnit("device", "device")] * device))
    return tuple(layers)


def _share(units: int, layer: int, num_layers: int) -> int:
    return (layer + 1) * units // num_layers - layer * units // num_layers


def kv_shares(kv: Sequence[Sequence[KVUnit]], places: Sequence[KVUnit]) -> tuple[float, ...]:
    """Share of the units in each place."""
    counts = Counter(unit for units, layers in Counter(map(tuple, kv)).items() for unit in units for _ in range(layers))
    total = sum(counts.values())
    return tuple(counts[unit] / total for unit in places)
