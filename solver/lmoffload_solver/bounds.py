"""Closed-form bounds of every candidate of the domain: the program solved by hand, before any candidate is looked at alone.

What a class of tensors costs in a format adds up over the classes, so formats are priced class by class. A format of a class that takes
no fewer bytes and no less time than another, for each of its matrices in every sampled step, is no choice, nor is a kernel or a format of
keys and values of which that holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.candidate import MOST_PREFETCH_WITH_LOADS, Candidate, Cut, Domain
from lmoffload_solver.class_costs import ClassBytes, ClassCosts
from lmoffload_solver.closed_form import Case, StepSums, bounds_s, cases_of
from lmoffload_solver.costs import PHASES, Phase
from lmoffload_solver.counting import Array
from lmoffload_solver.matrix_kinds import LargestLayer, layers_alike, streaming_of
from lmoffload_solver.prices import Prices
from lmoffload_solver.rounding import Stream
from lmoffload_solver.value import TensorClass
from lmoffload_solver.variants import EXACT, Offered, Variant

Homes = tuple[Stream, int]
"""What streams at once, and of how many layers keys and values are on the disk."""


@dataclass(frozen=True)
class _Option:
    """A format of a class (None: as stored): its bytes and seconds."""

    format: str | None
    bytes: ClassBytes
    products: Array
    """Seconds, [phases, blocks, matrices of the different layers, last the head]."""
    seconds: Array
    """Their sums, [phases, blocks, kinds of layers + head]."""

    def no_better(self, other: _Option) -> bool:
        """Whether the other takes no more in every respect."""
        mine, theirs = self.bytes, other.bytes
        fewer = (mine.per_matrix >= theirs.per_matrix).all() and mine.stored >= theirs.stored
        return bool(fewer and (self.products >= other.products).all())


class Bounds:
    """The domain of a job and its bounds."""

    def __init__(self, prices: Prices, domain: Domain, offered: Offered) -> None:
        self.prices, self.domain, self.offered = prices, domain, offered
        self.model = prices.model
        self.costs = ClassCosts(prices, domain.threads[0], offered)
        self.classes, self.alike = self.costs.classes, layers_alike(self.model)
        self.stored_at_home = sum(self.costs.bytes[name, None].aligned for name in self.classes)
        self.transfers = cache(lambda blocks, steps, size, fmt, on_disk: prices.transfers(fmt).least(blocks, steps, size, on_disk))
        self.streaming = cache(lambda kinds, stream, largest, head_bytes: streaming_of(kinds, stream, largest, head_bytes, prices))

    def __iter__(self) -> Iterator[tuple[float, Candidate]]:
        """Every candidate that may fit and is not dominated, with its bound."""
        for threads in self.domain.threads:
            for size, count in self.domain.micro_batches:
                for cut, rooms in self._cuts(threads, size, count):
                    yield from self._of_cut(cut, rooms)

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
        stored = [self.costs.stored_kernels(cut, phase) for phase in PHASES]
        quantized = [self.costs.quantized_kernels(cut, phase) for phase in PHASES]
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
        times = {kv_format: self.costs.rests(cut, kv_format) for kv_format in known}
        sizes = {kv_format: self.prices.memory(kv_format).kv.host_bytes(cut.micro_batch, cut.block_rows, 0) for kv_format in known}
        pages = {kv_format: [counting.changed_pages(layer, kv_format) for layer in self.model.layers] for kv_format in known}
        for kv_format in known:
            smaller = (other for other in known if sizes[other] < sizes[kv_format] and (times[other] <= times[kv_format]).all())
            if not any(pages[other] <= pages[kv_format] or self._roomy(known[other]) for other in smaller):
                kept.append(kv_format)
        return kept

    def _options(
        self, cut: Cut, name: TensorClass, stored: Sequence[str], packed: Sequence[str | None]
    ) -> list[_Option]:
        """The formats of a class under these kernels (one of each phase) that no other beats."""
        costs, found = self.costs, list[_Option]()
        for fmt in self.offered.weights[name]:
            kernels = list(zip(PHASES, stored if fmt is None else packed, strict=True))
            if fmt is None:
                products = [costs.products(cut, phase, None, str(k))[name] for phase, k in kernels]
            else:
                products = [costs.quantized(cut, phase, fmt, k)[name] for phase, k in kernels]
            if np.isfinite(products).all():
                found.append(_Option(fmt, costs.bytes[name, fmt], np.array(products), costs.by_kind(name, np.array(products))))
        if name == "embedding" and name != self.costs.head_class:
            return [found[0], *found[-1:]] if len(found) > 1 else found  # its bytes alone count: as stored, or the narrowest
        kept: list[_Option] = []
        for option in found:  # of two that are alike in every respect the first one, as stored if that is one of them
            if not any(option.no_better(other) for other in kept):
                kept = [*(other for other in kept if not other.no_better(option)), option]
        return kept

    def _bounded(
        self, cut: Cut, candidate: Candidate, chosen: Sequence[_Option], rooms: dict[Homes, int]
    ) -> Iterator[tuple[float, Candidate]]:
        costs = self.prices.costs(candidate.threads)
        head_bytes = int(next(o.bytes.stored for n, o in zip(self.classes, chosen, strict=True) if n == self.costs.head_class))
        all_at_home = sum(option.bytes.aligned for option in chosen)
        in_layers = tuple(kind for option in chosen for kind in option.bytes.kinds)
        sizes = ([o.bytes.per_kind for o in chosen], [o.bytes.homes for o in chosen])
        stored, aligned = (int(np.sum(of_classes, axis=0).max()) for of_classes in sizes)
        largest = LargestLayer(self.model.num_layers, stored, aligned, self.alike)
        sums = self._sums(cut, candidate, chosen)
        cases: list[Case] = []
        homes: list[Homes] = []
        moved: list[tuple[Array, Array]] = []
        for (stream, on_disk), room in rooms.items():
            less = [n for n in self.domain.kv_on_disk if n < on_disk or (stream == "matrix" and not n)]
            if any(all_at_home <= rooms.get(("layer", n), -1) for n in less):
                continue  # nothing streams, or it need not for less
            streaming = self.streaming(in_layers, stream, largest, head_bytes)
            cases += cases_of(streaming.layers, streaming.head, room, self.domain.depths, len(homes))
            homes.append((stream, on_disk))
            moved.append(self._transfers(cut, candidate, on_disk, len(sums.weight)))
        bounds = bounds_s(sums, costs.contention, cases, moved).reshape(len(homes), 2, len(self.domain.depths)).min(axis=1)
        for (stream, on_disk), of_homes in zip(homes, bounds.tolist(), strict=True):
            for depth, bound in zip(self.domain.depths, of_homes, strict=True):
                if bound < np.inf and (not on_disk or depth <= MOST_PREFETCH_WITH_LOADS):
                    yield bound, candidate.streaming(stream, depth, on_disk)

    def _transfers(self, cut: Cut, candidate: Candidate, on_disk: int, num_steps: int) -> tuple[Array, Array]:
        """Loads and stores in each step with keys and values of some layers on the disk, at least."""
        if not on_disk:
            return np.zeros(num_steps), np.zeros(num_steps)
        steps = self.prices.job(cut.threads, EXACT).steps
        return self.transfers(self.costs.blocks(cut), steps, cut.micro_batch, candidate.variant.kv_format, on_disk)

    def _sums(self, cut: Cut, candidate: Candidate, chosen: Sequence[_Option]) -> StepSums:
        job = self.prices.job(cut.threads, Variant((), candidate.variant.kv_format))
        seconds = sum((option.seconds for option in chosen), np.zeros_like(chosen[0].seconds))
        rests = self.costs.rests(cut, candidate.variant.kv_format)
        rows = []
        for number, block in enumerate(self.costs.blocks(cut)):
            for place, step in enumerate(job.steps):
                phase: Phase = "decode" if step.step else "prefill"
                linear = seconds[PHASES.index(phase), number]
                layers = linear[:-1] + rests[number, place]
                compute = float(layers @ self.costs.layers_of_kind) + float(linear[-1]) + self.costs.outside(cut, number, phase)
                early = float(step.step == 1 or (step.step == 0 and (number > 0 or block.count > 1)))
                rows.append((block.count * step.weight, compute, early, float(layers.min()), float(linear[-1])))
        return StepSums(*np.array(rows).T)
