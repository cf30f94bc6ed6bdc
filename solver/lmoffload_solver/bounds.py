"""Closed-form bounds of every candidate of the domain: the program solved by hand, before any candidate is looked at alone.

What a class of tensors costs in a format adds up over the classes, so formats are priced class by class. A format of a class that takes
no fewer bytes and no less time than another, in every sampled step, is dominated: any placement does as well with the other. The same
holds of kernels and of formats of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.blocks import BatchSizes, Block
from lmoffload_solver.candidate import MOST_PREFETCH_WITH_LOADS, Candidate, Cut, Domain
from lmoffload_solver.closed_form import StepSums, least_streamed, streaming_bound_s
from lmoffload_solver.costs import PHASES, Phase
from lmoffload_solver.counting import Array
from lmoffload_solver.prices import Prices
from lmoffload_solver.rounding import Stream
from lmoffload_solver.schedule import aligned_bytes, largest_read
from lmoffload_solver.value import TensorClass
from lmoffload_solver.variants import EXACT, Offered, Variant, placed_classes

Homes = tuple[Stream, int]
"""What streams at once, and of how many layers keys and values are on the disk."""


@dataclass(frozen=True)
class _Option:
    """A format of a class (None: as stored): its bytes and seconds."""

    format: str | None
    per_kind: Array
    """Bytes of a layer, by kind of layer."""
    largest: float
    """Bytes of the largest matrix."""
    aligned: float
    """Bytes that all of it takes at home."""
    stored: float
    seconds: Array
    """[phases, blocks, kinds of layers + head]."""

    def no_better(self, other: _Option) -> bool:
        """Whether the other takes no more in every respect."""
        return bool((self.per_kind >= other.per_kind).all() and self.stored >= other.stored and (self.seconds >= other.seconds).all())


class Bounds:
    """The domain of a job and its bounds."""

    def __init__(self, prices: Prices, domain: Domain, offered: Offered) -> None:
        self.prices, self.domain, self.offered = prices, domain, offered
        self.model = prices.model
        self.classes = placed_classes(self.model)
        formats = dict.fromkeys(fmt for options in offered.weights.values() for fmt in options if fmt is not None)
        self.formats: tuple[str, ...] = tuple(formats)
        self.uniform: dict[str | None, Variant] = {None: EXACT, **{fmt: self._all_in(fmt) for fmt in self.formats}}
        threads = domain.threads[0]
        maps = [prices.job(threads, variant).kind_of_layer for variant in self.uniform.values()]
        kinds = list(zip(*maps, strict=True))
        distinct = list(dict.fromkeys(kinds))
        self.layer_of_kind = [kinds.index(kind) for kind in distinct]
        self.layers_of_kind = np.array([kinds.count(kind) for kind in distinct], dtype=np.float64)
        self.bytes = {(name, fmt): self._bytes(name, fmt) for name in self.classes for fmt in offered.weights[name]}
        self.head_class: TensorClass = self.model.head.tensor_class
        self.stored_at_home = sum(self.bytes[name, None][2] for name in self.classes)
        matrices = sum(counting.num_linears(self.model, layer) for layer in range(self.model.num_layers))
        self.num_units: dict[Stream, int] = {"layer": self.model.num_layers, "matrix": matrices}
        self.rests = cache(self._rests)
        self.sizes = cache(self._sizes)
        self._linears = cache(self._linear_seconds)
        self.transfers = cache(lambda blocks, steps, size, fmt, on_disk: prices.transfers(fmt).least(blocks, steps, size, on_disk))

    def __iter__(self) -> Iterator[tuple[float, Candidate]]:
        """Every candidate that may fit and is not dominated, with its bound."""
        for threads in self.domain.threads:
            for size, count in self.domain.micro_batches:
                for cut, rooms in self._cuts(threads, size, count):
                    yield from self._of_cut(cut, rooms)

    # Formats and kernels

    def _all_in(self, fmt: str) -> Variant:
        return Variant(tuple((name, fmt) for name, options in self.offered.weights.items() if fmt in options))

    def _bytes(self, name: TensorClass, fmt: str | None) -> tuple[Array, float, float, float]:
        """(bytes of a layer by kind, of the largest matrix, of all at home, of all as stored) of a class in a format."""
        kept = self.prices.kept(self.uniform[fmt])
        matrices = [counting.layer_matrices(kept, layer) for layer in self.layer_of_kind]
        of_class = [[t for t in of_layer if t.tensor_class == name] for of_layer in matrices]
        sizes = [[counting.tensor_bytes(t) for t in of_layer] for of_layer in of_class]
        per_kind = np.array([sum(of_layer) for of_layer in sizes], dtype=np.float64)
        homes = [sum(aligned_bytes(counting.tensor_bytes(t), t.num_runs) for t in of_layer) for of_layer in of_class]
        aligned = sum(count * home for count, home in zip(self.layers_of_kind, homes, strict=True))
        outside = [t for t in dict.fromkeys((kept.head, kept.embedding)) if t.tensor_class == name]
        stored = float(per_kind @ self.layers_of_kind) + sum(counting.tensor_bytes(t) for t in outside if t is kept.head)
        return (
            per_kind,
            float(max((size for of_layer in sizes for size in of_layer), default=0)),
            float(aligned + sum(aligned_bytes(counting.tensor_bytes(t)) for t in outside)),
            stored,
        )

    def linears(self, cut: Cut, phase: Phase, fmt: str | None, kernel: str) -> dict[TensorClass, Array]:
        """Seconds of each class in a format, [blocks, kinds + head]."""
        return self._linears(cut if phase == "prefill" else replace(cut, prefill_chunk=None), phase, fmt, kernel)

    def _linear_seconds(self, cut: Cut, phase: Phase, fmt: str | None, kernel: str) -> dict[TensorClass, Array]:
        job = self.prices.job(cut.threads, self.uniform[fmt])
        found = {name: np.zeros((len(self._blocks(cut)), len(self.layer_of_kind) + 1)) for name in self.classes}
        for number, block in enumerate(self._blocks(cut)):
            sizes = self.sizes(cut, block, phase)
            linears = job.linear_seconds(sizes, kernel)
            for place, layer in enumerate(self.layer_of_kind):
                of_kind = linears[job.kind_of_layer[layer]]
                for tensor, seconds in zip(counting.layer_matrices(job.model, layer), of_kind, strict=True):
                    found[tensor.tensor_class][number, place] += seconds
            found[self.head_class][number, -1] = job.head_seconds(sizes, kernel)
        return found

    def _blocks(self, cut: Cut) -> tuple[Block, ...]:
        return self.prices.blocks(cut.block_rows)

    def _sizes(self, cut: Cut, block: Block, phase: Phase) -> BatchSizes:
        return self.prices.job(cut.threads, EXACT).sizes(block, cut.micro_batch, phase, cut.prefill_chunk)

    def _stored_kernels(self, cut: Cut, phase: Phase) -> list[str]:
        known = self.prices.costs(cut.threads).linear.kernels(counting.main_format(self.model))
        times = {kernel: self.linears(cut, phase, None, kernel) for kernel in known}
        return _undominated({kernel: np.concatenate([a.ravel() for a in classes.values()]) for kernel, classes in times.items()})

    def _quantized_kernels(self, cut: Cut, phase: Phase) -> list[str | None]:
        """Kernels for what is quantized; None alone where nothing is."""
        linear = self.prices.costs(cut.threads).linear
        known = dict.fromkeys(kernel for fmt in self.formats for kernel in linear.kernels(fmt))
        times = {}
        for kernel in known:
            taken = [self._quantized(cut, phase, fmt, kernel) for fmt in self.formats]
            times[kernel] = np.concatenate([a.ravel() for classes in taken for a in classes.values()])
        return list(_undominated(times)) or [None]

    def _quantized(self, cut: Cut, phase: Phase, fmt: str, kernel: str | None) -> dict[TensorClass, Array]:
        """As `linears`; infinite where the kernel was not measured for the format, or may not be used with it."""
        assert kernel is not None
        usable = kernel in self.prices.costs(cut.threads).linear.kernels(fmt) and self.offered.takes(kernel, fmt)
        found = self.linears(cut, phase, fmt, kernel)
        return found if usable else {name: np.full_like(seconds, np.inf) for name, seconds in found.items()}

    # Candidates of a cut

    def _cuts(self, threads: int, size: int, count: int) -> Iterator[tuple[Cut, dict[str, dict[Homes, int]]]]:
        """The cuts into such blocks in which something fits, with their rooms: prompts whole, and in chunks where everything as stored does
        not stay at home without, and they leave more room than any larger ones."""
        most: dict[str, dict[Homes, int]] = {kv_format: {} for kv_format in self.offered.kv}
        for chunk in self.domain.prefill_chunks:
            if all(self._roomy(rooms) for rooms in most.values()):
                return
            cut = Cut(threads, size, count, chunk)
            found = self._rooms(cut)
            if any(room > most[kv_format].get(homes, -1) for kv_format, rooms in found.items() for homes, room in rooms.items()):
                yield cut, found
                for kv_format, rooms in found.items():
                    most[kv_format] |= {homes: max(room, most[kv_format].get(homes, -1)) for homes, room in rooms.items()}

    def _roomy(self, rooms: dict[Homes, int]) -> bool:
        """Whether everything as stored stays at home with all keys and values in memory."""
        return max((room for (_, on_disk), room in rooms.items() if not on_disk), default=-1) >= self.stored_at_home

    def _of_cut(self, cut: Cut, rooms: dict[str, dict[Homes, int]]) -> Iterator[tuple[float, Candidate]]:
        stored = [self._stored_kernels(cut, phase) for phase in PHASES]
        quantized = [self._quantized_kernels(cut, phase) for phase in PHASES]
        kv_options = self._kv_options(cut, rooms)
        size, count, chunk = cut.micro_batch, cut.num_micro_batches, cut.prefill_chunk
        for as_stored, packed in product(product(*stored), product(*quantized)):
            options = [self._options(cut, name, as_stored, packed) for name in self.classes]
            first = packed == (quantized[0][0], quantized[1][0])
            for chosen in product(*options):
                lossy = tuple((name, option.format) for name, option in zip(self.classes, chosen, strict=True) if option.format is not None)
                if not lossy and not first:
                    continue
                prefill, decode = (k if not lossy or q in (None, k) else f"{q}+{k}" for k, q in zip(as_stored, packed, strict=True))
                for kv_format in kv_options:
                    candidate = Candidate(size, count, cut.threads, prefill, decode, 0, "layer", Variant(lossy, kv_format), chunk)
                    if self.offered.permits(candidate.variant, candidate.kernels):
                        yield from self._bounded(cut, candidate, chosen, rooms[kv_format])

    def _rooms(self, cut: Cut) -> dict[str, dict[Homes, int]]:
        """Bytes for matrices by format of keys and values, then by homes; formats that leave nothing are left out."""
        found = {}
        size, rows = cut.micro_batch, cut.block_rows
        for kv_format in self.offered.kv:
            rooms: dict[Homes, int] = {}
            memory = self.prices.memory(kv_format)
            for stream in self.domain.streams:
                sizes, chunk = (size, cut.num_micro_batches, cut.threads), cut.prefill_chunk
                parts = memory.parts(*sizes, head_streams=False, layers_cut=stream == "matrix", prefill_chunk=chunk)
                room = self.prices.capacity.memory_bytes - parts.total
                rooms[stream, 0] = self.prices.within_weights(room)
                for on_disk in self.domain.kv_on_disk[1:] if stream == "layer" and not self._roomy(rooms) else ():
                    if memory.kv.disk_bytes(size, rows, on_disk) <= self.prices.capacity.disk_bytes:
                        freed = memory.kv.host_bytes(size, rows, 0) - memory.kv.host_bytes(size, rows, on_disk)
                        rooms[stream, on_disk] = self.prices.within_weights(room + freed)
            if max(rooms.values()) >= 0:
                found[kv_format] = rooms
        return found

    def _kv_options(self, cut: Cut, known: dict[str, dict[Homes, int]]) -> list[str]:
        """Formats of keys and values that none of fewer bytes beats in every step."""
        kept: list[str] = []
        times = {kv_format: self.rests(cut, kv_format) for kv_format in known}
        sizes = {kv_format: self.prices.memory(kv_format).kv.host_bytes(cut.micro_batch, cut.block_rows, 0) for kv_format in known}
        pages = {kv_format: [counting.changed_pages(layer, kv_format) for layer in self.model.layers] for kv_format in known}
        for kv_format in known:
            smaller = (other for other in known if sizes[other] < sizes[kv_format] and (times[other] <= times[kv_format]).all())
            if not any(pages[other] <= pages[kv_format] or self._roomy(known[other]) for other in smaller):
                kept.append(kv_format)
        return kept

    def _rests(self, cut: Cut, kv_format: str) -> Array:
        """What is no linear layer: [blocks, steps, kinds]."""
        job = self.prices.job(cut.threads, Variant((), kv_format))
        kinds = [job.kind_of_layer[layer] for layer in self.layer_of_kind]
        found = []
        for block in self._blocks(cut):
            by_phase = {phase: self.sizes(cut, block, phase) for phase in PHASES}
            rests = [job.rest_seconds(block, by_phase["decode" if step.step else "prefill"], step.step) for step in job.steps]
            found.append([[of_step[kind] for kind in kinds] for of_step in rests])
        return np.array(found)

    def _options(
        self, cut: Cut, name: TensorClass, stored: Sequence[str], packed: Sequence[str | None]
    ) -> list[_Option]:
        """The formats of a class under these kernels (one of each phase) that no other beats."""
        found: list[_Option] = []
        for fmt in self.offered.weights[name]:
            if fmt is None:
                seconds = [self.linears(cut, phase, None, k)[name] for phase, k in zip(PHASES, stored, strict=True)]
            else:
                seconds = [self._quantized(cut, phase, fmt, k)[name] for phase, k in zip(PHASES, packed, strict=True)]
            option = _Option(fmt, *self.bytes[name, fmt], np.array(seconds))
            if np.isfinite(option.seconds).all():
                found.append(option)
        if name == "embedding" and name != self.head_class:
            return [found[0], *found[-1:]] if len(found) > 1 else found  # its bytes alone count: as stored, or the narrowest
        kept: list[_Option] = []
        for option in found:  # of two that are alike in every respect the first one, as stored if that is one of them
            if not any(option.no_better(other) for other in kept):
                kept = [*(other for other in kept if not other.no_better(option)), option]
        return kept

    def _bounded(
        self, cut: Cut, candidate: Candidate, chosen: Sequence[_Option], rooms: dict[Homes, int]
    ) -> Iterator[tuple[float, Candidate]]:
        depths = np.array(self.domain.depths, dtype=np.float64)
        costs = self.prices.costs(candidate.threads)
        per_kind = sum((option.per_kind for option in chosen), np.zeros(len(self.layer_of_kind)))
        head_bytes = next(o.stored for n, o in zip(self.classes, chosen, strict=True) if n == self.head_class)
        all_at_home = sum(option.aligned for option in chosen)
        sums = self._sums(cut, candidate, chosen)
        total = float(per_kind @ self.layers_of_kind) + head_bytes
        for (stream, on_disk), room in rooms.items():
            smaller = [rooms["layer", fewer] for fewer in self.domain.kv_on_disk if fewer < on_disk and ("layer", fewer) in rooms]
            if (stream == "matrix" and all_at_home <= room) or any(all_at_home <= other for other in smaller):
                continue  # nothing streams, or it need not for less
            least = least_streamed(total, head_bytes, self.num_units[stream], room, depths)
            fits = np.isfinite(least)
            if not fits.any():
                continue
            largest = float(per_kind.max()) if stream == "layer" else max(option.largest for option in chosen)
            of_stream = self._staged(sums, cut, candidate, on_disk) if stream == "layer" else replace(sums, layer=np.zeros_like(sums.layer))
            rate = costs.disk.best_rate(largest_read(largest, head_bytes))
            bounds = streaming_bound_s(of_stream, costs.contention, rate, largest, head_bytes, depths, np.where(fits, least, 0.0))
            for depth, bound, fit in zip(self.domain.depths, bounds.tolist(), fits.tolist(), strict=True):
                if fit and (not on_disk or depth <= MOST_PREFETCH_WITH_LOADS):
                    yield bound, candidate.streaming(stream, depth, on_disk)

    def _staged(self, sums: StepSums, cut: Cut, candidate: Candidate, on_disk: int) -> StepSums:
        """The same with keys and values of some layers on the disk."""
        if not on_disk:
            return sums
        steps = self.prices.job(cut.threads, EXACT).steps
        load, store = self.transfers(self._blocks(cut), steps, cut.micro_batch, candidate.variant.kv_format, on_disk)
        return replace(sums, load=load, store=store)

    def _sums(self, cut: Cut, candidate: Candidate, chosen: Sequence[_Option]) -> StepSums:
        job = self.prices.job(cut.threads, Variant((), candidate.variant.kv_format))
        seconds = sum((option.seconds for option in chosen), np.zeros_like(chosen[0].seconds))
        rests = self.rests(cut, candidate.variant.kv_format)
        weight, compute, early, layer = [], [], [], []
        for number, block in enumerate(self._blocks(cut)):
            for place, step in enumerate(job.steps):
                phase: Phase = "decode" if step.step else "prefill"
                linear = seconds[PHASES.index(phase), number]
                layers = linear[:-1] + rests[number, place]
                outside = self._outside(cut, number, phase)
                weight.append(block.count * step.weight)
                compute.append(float(layers @ self.layers_of_kind) + float(linear[-1]) + outside)
                early.append(float(step.step == 1 or (step.step == 0 and (number > 0 or block.count > 1))))
                layer.append(float(layers.min()))
        none = np.zeros(len(weight))
        return StepSums(np.array(weight), np.array(compute), np.array(early), np.array(layer), none, none)

    def _outside(self, cut: Cut, number: int, phase: Phase) -> float:
        """What a step costs outside layers and the head's product, the head in one piece."""
        job, block = self.prices.job(cut.threads, EXACT), self._blocks(cut)[number]
        sizes = self.sizes(cut, block, phase)
        return job.piece_seconds(sizes) + job.around_seconds(block, sizes)


def _undominated(times: dict[str, Array]) -> list[str]:
    """The names, quickest first, of those that are somewhere quicker than each of the others kept."""
    kept: list[str] = []
    for name in sorted(times, key=lambda name: float(np.nan_to_num(times[name], posinf=1e30).sum())):
        if not any((times[other] <= times[name]).all() for other in kept):
            kept.append(name)
    return kept
