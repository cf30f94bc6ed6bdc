"""The discrete choices of a plan with a device, and the closed-form bounds of all of them.

Batch: micro-batch 2^i, 3·2^i and the job cut into 1 to 4 equal parts, the same for the number of micro-batches up to 24. Formats of each
class of matrices, of keys and values, and how products take them in each phase (`chain_variants`). Home of the hidden states; prefetch
depth; whether the host attends (not without reading ahead: then it would wait); threads of each class of tasks on the host. Limits fix a
choice. Of several accelerators: how many waves follow one another through them; splits of the layers are tried when a plan is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.chain_bounds import Amounts, closed_form_s
from lmoffload_solver.chain_program import ChainChoices
from lmoffload_solver.chain_rounding import Rooms, WeightPlacer
from lmoffload_solver.chain_terms import Array, ChainTerms
from lmoffload_solver.chain_variants import Formats, Way, variants_of
from lmoffload_solver.decision import Job, Products
from lmoffload_solver.device_costs import Pair
from lmoffload_solver.device_memory import BUFFERS, memory_of
from lmoffload_solver.loss import LossTable
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.pipeline import ALONE, Pipeline
from lmoffload_solver.value import Quality, Tier
from lmoffload_solver.workload import Limits

MOST_MICRO_BATCHES = 24
DEPTHS = (1, 2, 0)
LARGE_HEAD = 0.1
"""An output head that takes more than this share of the device is not placed in part by the program: what it gains is far from what whole
tensors can."""

HIDDEN: tuple[Tier, ...] = ("device", "host")

PRICED: tuple[Pair, ...] = (("upload", "host_attention"), ("device", "device"))
"""Pairs of resources whose slowing each other has rows of its own, or is in the price of the work."""


@dataclass(frozen=True)
class ChainCandidate:
    """The discrete choices."""

    micro_batch: int
    num_micro_batches: int
    formats: Formats
    kv_format: str
    hidden: Tier
    products: tuple[Products, Products] = ("widen", "widen")
    """In prefill, in decode."""
    prefetch_depth: int = 1
    attends: bool = False
    """Whether the host attends to some of the keys and values that are not on the device."""
    assignment: int = 0
    """Of threads, of `ChainTerms.assignments`."""
    head_at_home: bool | None = None
    """Whether the output head lies on the device, where much hangs on it; None: as it turns out."""
    waves: int = 1

    @property
    def pair(self) -> tuple[int, int]:
        return self.micro_batch, self.num_micro_batches

    @property
    def slots(self) -> int:
        """Buffers of weights, as `chain_schedule.num_buffers`."""
        return self.prefetch_depth + 1 + int(self.attends)


class Bounded(NamedTuple):
    """Candidates that differ in depth, attention and threads alone, and seconds that none of them goes below."""

    seconds: float
    candidate: ChainCandidate


class ChainDomain:
    """The domain of a job on a machine."""

    def __init__(
        self, job: Job, machine: MachineProfile, disk: Disk, limits: Limits, quality: Quality, losses: LossTable | None = None
    ) -> None:
        self.job, self.model, self.limits, self.quality, self.losses = job, job.model, limits, quality, losses
        self.pairs = tuple(self._pairs())
        self.terms = ChainTerms(job, machine, disk, self.pairs, limits.threads)
        self.memory = memory_of(job, machine, limits)
        self.rows = np.array([min(size, job.num_prompts) for size, _ in self.pairs], dtype=np.float64)
        self.block_rows = np.array([min(size * count, job.num_prompts) for size, count in self.pairs], dtype=np.float64)
        self.num_devices = self.terms.num_devices
        self.placers = cache(self._placers)
        """Of the weights in some formats at each stage of a pipeline."""
        self.variants = variants_of(self.terms, quality, losses, self._host_may_bind)
        self.base_format, self.kv_formats, self.formats = self.variants.base_kv, self.variants.kv_formats, self.variants.formats
        self.placed = [t for t in self.model.tensors if t.is_matrix and (t.layer is not None or t.name == self.model.head.name)]
        """Matrices whose homes cost time."""

    def _pairs(self) -> Iterator[tuple[int, int]]:
        num = self.job.num_prompts
        fixed_size, fixed_count = self.limits.micro_batch, self.limits.num_micro_batches
        for size in grid(num, num) if fixed_size is None else (min(fixed_size, num),):
            most = -(-num // size)
            yield from ((size, count) for count in (grid(most, MOST_MICRO_BATCHES) if fixed_count is None else (min(fixed_count, most),)))

    def placer(self, formats: Formats) -> WeightPlacer:
        """Of the weights in some formats."""
        (placer,) = self.placers(formats, ALONE)
        return placer

    def _placers(self, formats: Formats, pipeline: Pipeline) -> tuple[WeightPlacer, ...]:
        memory = self.memory
        of_stages = [memory.groups_of(pipeline, stage) for stage in range(pipeline.num_stages)]
        return tuple(WeightPlacer(self.model, dict(formats), memory.room_bytes, memory.head_in_pieces, groups) for groups in of_stages)

    @cached_property
    def _host_may_bind(self) -> bool:
        largest = sum(counting.tensor_bytes(t) for t in self.model.tensors) * (1 + (max(DEPTHS) + 2))
        kv = self.memory.kv_token_bytes(self.memory.base_kv) * float(self.block_rows.max())
        hidden = self.memory.hidden_bytes(float(self.block_rows.max()))
        room = min(self.memory.capacity["host"], self.memory.weights_capacity)
        return bool(largest + kv + hidden + self.memory.machine.base_bytes > room)

    def loss(self, candidate: ChainCandidate) -> float | None:
        """The estimated loss of a candidate; None where it is unknown."""
        return self.variants.loss(candidate.formats, candidate.products, candidate.kv_format)

    def widened(self, formats: Formats, products: tuple[Products, Products]) -> int:
        """Elements of the 16-bit copy that widened weights take."""
        in_products = all(self.terms.costs.processing.in_products(way) for way in products)
        return 0 if in_products else self.memory.widened(formats, True)

    # Bounds

    def bounded(self) -> Iterator[Bounded]:
        """All candidates that may fit, depth, attention and threads open, the smallest bound first; of equal bounds those that keep
        everything as stored, then the smallest."""
        variants = list(self.variants.ways())
        sizes = np.array([self.terms.sizes(formats).total for formats, _, _ in variants])
        cells = [(kv_format, hidden) for kv_format in self.kv_formats for hidden in HIDDEN]
        bounds = np.stack([self._bounds(variants, kv_format, hidden) for kv_format, hidden in cells])
        lossy = np.add.outer([int(kv_format != self.base_format) for kv_format, _ in cells], [len(one.formats) for one in variants])
        fitting = np.nonzero(np.isfinite(bounds))
        cell, variant, pair = fitting
        seconds = bounds[fitting]
        for place in np.lexsort((sizes[variant], lossy[cell, variant], seconds)):
            formats, products, _ = variants[variant[place]]
            kv_format, hidden = cells[cell[place]]
            size, count = self.pairs[pair[place]]
            candidate = ChainCandidate(size, count, formats, kv_format, hidden, products)
            yield Bounded(float(seconds[place]), candidate)

    def _bounds(self, variants: list[Way], kv_format: str, hidden: Tier) -> Array:
        """Variants × batches; infinite where they do not fit, or another way is no slower."""
        shape = (len(variants), len(self.pairs))
        others = {tier: np.array([[float(self.placer(f).other_bytes[tier])] for f, _, _ in variants]) for tier in HIDDEN}
        widened = np.array([[float(self.widened(formats, products))] for formats, products, _ in variants])
        left = self.memory.transients(self.rows, self.block_rows, hidden, kv_format, widened)
        device = self.num_devices * (self.memory.capacity["device"] - sum(left.device.values())) - others["device"]
        host = np.broadcast_to(self.memory.capacity["host"] - sum(left.host.values()) - others["host"], shape)
        kv = np.broadcast_to(self.memory.kv_token_bytes(kv_format) * self.block_rows, shape)
        weights = np.broadcast_to(np.array([[float(self.terms.sizes(formats).total)] for formats, _, _ in variants]), shape)
        largest = np.broadcast_to(np.array([[self._largest(formats)] for formats, _, _ in variants]), shape)
        granted = np.broadcast_to(self.memory.weights_capacity - self.memory.vectors - others["device"] - others["host"], shape)
        fits = (device >= 0) & (host >= 0) & (granted >= 0) & (weights + kv <= device + host + self.memory.capacity["disk"])
        fits &= ~np.stack([beaten for _, _, beaten in variants])
        fits &= np.array([[self.variants.permits(formats, products, kv_format)] for formats, products, _ in variants])
        if not fits.any():
            return np.full(shape, np.inf)
        amounts = Amounts(weights, self.num_devices * largest, kv, np.maximum(device, 0.0), np.maximum(host, 0.0), granted)
        bounds = [
            closed_form_s(
                self.terms,
                self.terms.least_steps(kv_format, on_device),
                np.stack([self.terms.packed(formats, products, on_device) for formats, products, _ in variants]),
                amounts,
                depth=max(DEPTHS),
                hidden=hidden == "host",
                read_rate=self.terms.read_rate(None),
            )
            for on_device in self.terms.devices
        ]
        return np.where(fits, np.minimum.reduce(bounds), np.inf)

    def _largest(self, formats: Formats) -> float:
        sizes = self.terms.sizes(formats)
        return max(sizes.in_layers / self.model.num_layers, float(sizes.classes["head"]))

    def open(self, candidate: ChainCandidate) -> Iterator[ChainCandidate]:
        """Every depth, place of attention and assignment of threads for a candidate. Where the device alone attends, threads only read;
        where everything may be on the device, no depth is better than another."""
        rooms = self.rooms(candidate)
        kv_bytes = self.kv_bytes(candidate)
        everything_home = self.terms.sizes(candidate.formats).total + kv_bytes <= rooms["device"]
        depths = DEPTHS[:1] if everything_home else DEPTHS
        if self.terms.sizes(candidate.formats).classes["head"] > LARGE_HEAD * rooms["device"] and not everything_home:
            candidates = [replace(candidate, head_at_home=at_home) for at_home in (True, False)]
        else:
            candidates = [candidate]
        for one in candidates:
            for waves in self._waves(one, everything_home):
                yield from self._opened(replace(one, waves=waves), depths)

    def _waves(self, candidate: ChainCandidate, everything_home: bool) -> Sequence[int]:
        """One wave moves weights once; as many as there are accelerators keep all of them at work."""
        most = min(self.num_devices, candidate.num_micro_batches)
        return [most] if everything_home else sorted({1, most}, reverse=True)

    def _opened(self, candidate: ChainCandidate, depths: Sequence[int]) -> Iterator[ChainCandidate]:
        alone, both = self.terms.worth_trying(candidate.num_micro_batches)
        yield from (replace(candidate, prefetch_depth=depth, attends=False, assignment=number) for depth in depths for number in alone)
        for number in both:
            yield from (replace(candidate, prefetch_depth=depth, attends=True, assignment=number) for depth in depths if depth)

    # Memory

    def kv_bytes(self, candidate: ChainCandidate) -> float:
        """Keys and values of the first block."""
        rows = min(candidate.micro_batch * candidate.num_micro_batches, self.job.num_prompts)
        return self.memory.kv_token_bytes(candidate.kv_format) * rows

    def rooms(self, candidate: ChainCandidate) -> dict[Tier, float]:
        """Bytes of each tier, the device's of all accelerators, for homes and buffers of layers, head, and KV."""
        rows = min(candidate.micro_batch, self.job.num_prompts)
        block = min(candidate.micro_batch * candidate.num_micro_batches, self.job.num_prompts)
        widened = self.widened(candidate.formats, candidate.products)
        left = self.memory.transients(rows, block, candidate.hidden, candidate.kv_format, widened)
        others = self.placer(candidate.formats).other_bytes
        return {
            "device": self.num_devices * (self.memory.capacity["device"] - sum(left.device.values())) - others["device"],
            "host": self.memory.capacity["host"] - sum(left.host.values()) - others["host"],
            "disk": float(self.memory.capacity["disk"]),
        }

    def weights_room(self, candidate: ChainCandidate) -> float:
        """Bytes that the user's limit leaves for homes and buffers of layers and head."""
        others = self.placer(candidate.formats).other_bytes
        return self.memory.weights_capacity - self.memory.vectors - others["device"] - others["host"]

    def weight_rooms(self, candidate: ChainCandidate, left: Mapping[Tier, float]) -> Rooms:
        """What is left for weights where everything else leaves so much of each tier."""
        disk = left["disk"] if self.terms.read_rate(candidate.assignment) else 0.0
        return Rooms(left["device"], left["host"], disk, self.memory.weights_capacity - self.memory.vectors)

    def least_s(self, candidate: ChainCandidate) -> float:
        """Seconds of the device's work alone, under the candidate's threads."""
        steps = self.terms.of_pair(candidate.pair, candidate.kv_format, candidate.hidden == "host", candidate.assignment)
        packed = self.terms.packed_of_pair(candidate.pair, candidate.formats, candidate.products, candidate.assignment)
        return float(steps.weight @ (steps.device + packed))

    def choices(self, candidate: ChainCandidate) -> ChainChoices:
        """The program's constants."""
        kv_bytes, rooms = self.kv_bytes(candidate), self.rooms(candidate)
        sizes = self.terms.sizes(candidate.formats)
        buffers = 2 * candidate.slots * self._largest(candidate.formats) + 2 * BUFFERS * kv_bytes / self.model.num_layers
        read_rate = self.terms.read_rate(candidate.assignment)
        packed = self.terms.packed_of_pair(candidate.pair, candidate.formats, candidate.products, candidate.assignment)
        in_products = [self.terms.costs.processing.in_products(candidate.products[min(1, step.step)]) for step in self.job.steps]
        slowdowns = self.terms.costs_with(candidate.assignment).contention
        return ChainChoices(
            sizes=sizes,
            steps=self.terms.of_pair(candidate.pair, candidate.kv_format, candidate.hidden == "host", candidate.assignment),
            packed_s=packed,
            fused_s=np.where(np.resize(in_products, len(packed)), packed, 0.0),
            num_layers=self.model.num_layers,
            prefetch_depth=candidate.prefetch_depth,
            slots=candidate.slots,
            num_devices=self.num_devices,
            waves=candidate.waves,
            kv_bytes=kv_bytes,
            kv_buffers=self.memory.kv_buffers(min(candidate.micro_batch, self.job.num_prompts), candidate.kv_format),
            rooms=rooms,
            weights_room=self.weights_room(candidate),
            upload_bytes_per_s=self.terms.upload_rate / candidate.waves,
            read_bytes_per_s=read_rate / candidate.waves,
            contention=self.terms.contention,
            crowded={pair: slow for pair, slow in slowdowns.items() if pair not in PRICED},
            attends=candidate.attends,
            head_at_home=candidate.head_at_home,
            head_in_pieces=self.memory.head_in_pieces,
            disk_kv=bool(read_rate) and sizes.total + kv_bytes + buffers > rooms["device"] + rooms["host"],
        )


def grid(total: int, most: int) -> tuple[int, ...]:
    """2^i and 3·2^i up to `total` and `most`, and `total` cut into 1 to 4 equal parts, ascending."""
    sizes = {factor << i for factor in (1, 3) for i in range(total.bit_length())}
    sizes |= {-(-total // parts) for parts in range(1, 5)}
    return tuple(sorted(size for size in sizes if size <= min(total, most)))
