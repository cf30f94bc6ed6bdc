"""From the program's fractions to whole tensors and whole (layer, micro-batch) units of KV, spread evenly over the layers.

Running sums follow their even share from layer to layer, so that every window of prefetch-depth layers streams nearly equal bytes. What
rounding costs shows as the difference between the program's value and the simulated time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, floor

from lmoffload_solver import counting
from lmoffload_solver.decision import KVUnit
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.value import TensorClass, Tier

NEARLY = 1e-6
"""What the solver's tolerance may lack to a whole unit."""

MOST_PLACEMENTS = 3000
"""Up to so many placements of whole tensors and units, every one is looked at instead of those that rounding gives."""

HALVINGS = 7
"""Of the interval of the device's budget for weights."""


@dataclass(frozen=True)
class WeightHomes:
    """Whole tensors placed."""

    homes: dict[str, Tier]
    bytes: dict[Tier, int]
    largest_streamed: int
    """Of a layer or the head: what goes up to the device."""
    largest_staged: int
    """What comes from disk."""


class WeightPlacer:
    """Places the matrices of a model kept in some formats."""

    def __init__(self, model: ModelShape, formats: dict[TensorClass, str]) -> None:
        groups = [counting.layer_matrices(model, layer) for layer in range(model.num_layers)]
        self.groups: list[list[tuple[int, str]]] = []
        for tensors in [*groups, (model.head,)]:
            self.groups.append(sorted(((self._size(t, formats), t.name) for t in tensors), reverse=True))
        placed = {name for group in self.groups for _, name in group}
        self.others: dict[str, Tier] = {}
        """Matrices that cost no time wherever they lie: an embedding table of its own stays on the host, small tables on the device."""
        self.other_bytes: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        for tensor in model.tensors:
            if tensor.is_matrix and tensor.name not in placed:
                tier: Tier = "host" if tensor.name == model.embedding.name else "device"
                self.others[tensor.name] = tier
                self.other_bytes[tier] += counting.tensor_bytes(tensor)
        self.total = sum(size for group in self.groups for size, _ in group)

    def place(self, device_bytes: float, host_bytes: float) -> WeightHomes:
        """At most so many bytes on the device, then on the host, the rest on disk, each spread evenly over the layers."""
        homes: dict[str, Tier] = dict(self.others)
        used: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        shares: tuple[tuple[Tier, float], ...] = (("device", device_bytes / self.total), ("host", (device_bytes + host_bytes) / self.total))
        seen = 0
        streamed = staged = 0
        for group in self.groups:
            seen += sum(size for size, _ in group)
            up = down = 0
            for size, name in group:
                if used["device"] + size <= shares[0][1] * seen + NEARLY:
                    home: Tier = "device"
                elif used["device"] + used["host"] + size <= shares[1][1] * seen + NEARLY and used["host"] + size <= host_bytes:
                    home = "host"
                else:
                    home = "disk"
                homes[name] = home
                used[home] += size
                up += size if home != "device" else 0
                down += size if home == "disk" else 0
            streamed, staged = max(streamed, up), max(staged, down)
        return WeightHomes(homes, used, streamed, staged)

    def fill(self, device_room: float, host_room: float, slots: int) -> WeightHomes | None:
        """The most on the device, then on the host, that fits with `slots` buffers of the largest layer; None where nothing does."""
        host = host_room - self.other_bytes["host"]
        device = device_room - self.other_bytes["device"]

        def fits(placed: WeightHomes) -> bool:
            on_host = placed.bytes["host"] + slots * placed.largest_staged
            return placed.bytes["device"] + slots * placed.largest_streamed <= device and on_host <= host

        everything = self.place(self.total, 0)
        if fits(everything):
            return everything
        best = self._fill_host(0.0, host, slots)
        if best is None or not fits(best):
            return None
        low, high = 0.0, min(device, float(self.total))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            tried = self._fill_host(middle, host, slots)
            if tried is not None and fits(tried):
                low, best = middle, tried
            else:
                high = middle
        return best

    def _fill_host(self, device_bytes: float, host_room: float, slots: int) -> WeightHomes | None:
        placed = self.place(device_bytes, self.total)
        if placed.bytes["host"] <= host_room:
            return placed
        high = host_room
        for _ in range(HALVINGS // 2):
            tried = self.place(device_bytes, high)
            if tried.bytes["host"] + slots * tried.largest_staged <= host_room:
                return tried
            high = min(high, host_room - slots * tried.largest_staged) * 0.995
        return None

    @staticmethod
    def _size(tensor: TensorShape, formats: dict[TensorClass, str]) -> int:
        return counting.tensor_bytes(tensor, formats.get(tensor.tensor_class) if tensor.layer is not None else None)


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
