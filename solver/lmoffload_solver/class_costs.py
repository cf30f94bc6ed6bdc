"""What each class of tensors costs in each format and with each kernel: bytes, reads and computing, for every way to cut a job.

They add up over the classes, so the formats of all classes together are never looked at here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.blocks import BatchSizes, Block
from lmoffload_solver.candidate import Cut
from lmoffload_solver.costs import PHASES, Phase
from lmoffload_solver.counting import Array
from lmoffload_solver.matrix_kinds import MatrixKind, kinds_of
from lmoffload_solver.prices import Prices
from lmoffload_solver.schedule import aligned_bytes
from lmoffload_solver.value import TensorClass
from lmoffload_solver.variants import EXACT, Offered, Variant, placed_classes


@dataclass(frozen=True)
class ClassBytes:
    """A class in a format."""

    per_kind: Array
    """Bytes of a layer, by kind of layer."""
    per_matrix: Array
    """Bytes of each matrix of the different layers."""
    homes: Array
    """The same in memory."""
    aligned: float
    """Bytes that all of it takes at home."""
    stored: float
    """All that can stream."""
    kinds: tuple[MatrixKind, ...]
    """Its matrices in the layers."""


class ClassCosts:
    """Costs of a job's classes, each priced once."""

    def __init__(self, prices: Prices, threads: int, offered: Offered) -> None:
        self.prices, self.offered, self.model = prices, offered, prices.model
        self.classes = placed_classes(self.model)
        formats = dict.fromkeys(fmt for options in offered.weights.values() for fmt in options if fmt is not None)
        self.formats: tuple[str, ...] = tuple(formats)
        self.uniform: dict[str | None, Variant] = {None: EXACT, **{fmt: self._all_in(fmt) for fmt in self.formats}}
        maps = [prices.job(threads, variant).kind_of_layer for variant in self.uniform.values()]
        kinds = list(zip(*maps, strict=True))
        distinct = list(dict.fromkeys(kinds))
        self.layer_of_kind = [kinds.index(kind) for kind in distinct]
        self.layers_of_kind = np.array([kinds.count(kind) for kind in distinct], dtype=np.float64)
        self.kinds = {fmt: kinds_of(prices.kept(variant)) for fmt, variant in self.uniform.items()}
        self.bytes = {(name, fmt): self._bytes(name, fmt) for name in self.classes for fmt in offered.weights[name]}
        self.head_class: TensorClass = self.model.head.tensor_class
        self.main_format = counting.main_format(self.model)
        self.rests = cache(self._rests)
        self.sizes = cache(self._sizes)
        self._products = cache(self._product_seconds)
        self.matrices = [
            (tensor.tensor_class, layer, place)
            for layer in self.layer_of_kind
            for place, tensor in enumerate(counting.layer_matrices(self.model, layer))
        ]
        self.layer_sums = {name: self._summing(name) for name in self.classes}

    def _all_in(self, fmt: str) -> Variant:
        return Variant(tuple((name, fmt) for name, options in self.offered.weights.items() if fmt in options))

    def _summing(self, name: TensorClass) -> Array:
        """1 where a class's matrix is of a kind of layer, [matrices, kinds + head]."""
        kinds = len(self.layer_of_kind)
        columns = [self.layer_of_kind.index(layer) for of_class, layer, _ in self.matrices if of_class == name]
        return np.eye(kinds + 1)[columns + ([kinds] if name == self.head_class else [])]

    def _bytes(self, name: TensorClass, fmt: str | None) -> ClassBytes:
        """A class in a format."""
        kept = self.prices.kept(self.uniform[fmt])
        matrices = [counting.layer_matrices(kept, layer) for layer in self.layer_of_kind]
        of_class = [[t for t in of_layer if t.tensor_class == name] for of_layer in matrices]
        sizes = [[counting.tensor_bytes(t) for t in of_layer] for of_layer in of_class]
        per_kind = np.array([sum(of_layer) for of_layer in sizes], dtype=np.float64)
        homes = [sum(aligned_bytes(counting.tensor_bytes(t), t.num_runs) for t in of_layer) for of_layer in of_class]
        aligned = sum(count * home for count, home in zip(self.layers_of_kind, homes, strict=True))
        outside = [t for t in dict.fromkeys((kept.head, kept.embedding)) if t.tensor_class == name]
        stored = float(per_kind @ self.layers_of_kind) + sum(counting.tensor_bytes(t) for t in outside if t is kept.head)
        aligned += sum(aligned_bytes(counting.tensor_bytes(t)) for t in outside)
        kinds = tuple(kind for kind in self.kinds[fmt] if kind.tensor_class == name)
        per_matrix = np.array([size for of_layer in sizes for size in of_layer], dtype=np.float64)
        return ClassBytes(per_kind, per_matrix, np.array(homes, dtype=np.float64), float(aligned), stored, kinds)

    def products(self, cut: Cut, phase: Phase, fmt: str | None, kernel: str) -> dict[TensorClass, Array]:
        """Seconds of each product of a class in a format, [blocks, matrices of the different layers, last the head]."""
        return self._products(cut if phase == "prefill" else replace(cut, prefill_chunk=None), phase, fmt, kernel)

    def _product_seconds(self, cut: Cut, phase: Phase, fmt: str | None, kernel: str) -> dict[TensorClass, Array]:
        job = self.prices.job(cut.threads, self.uniform[fmt])
        found: dict[TensorClass, list[list[float]]] = {name: [] for name in self.classes}
        for block in self.blocks(cut):
            sizes = self.sizes(cut, block, phase)
            linears = job.linear_seconds(sizes, kernel)
            of_class: dict[TensorClass, list[float]] = {name: [] for name in self.classes}
            for name, layer, place in self.matrices:
                of_class[name].append(linears[job.kind_of_layer[layer]][place])
            of_class[self.head_class].append(job.head_seconds(sizes, kernel))
            for name, seconds in of_class.items():
                found[name].append(seconds)
        return {name: np.array(seconds) for name, seconds in found.items()}

    def by_kind(self, name: TensorClass, seconds: Array) -> Array:
        """Seconds of a class's products, [..., matrices], summed: [..., kinds of layers + head]."""
        return seconds @ self.layer_sums[name]

    def blocks(self, cut: Cut) -> tuple[Block, ...]:
        """The different blocks of a cut."""
        return self.prices.blocks(cut.block_rows)

    def _sizes(self, cut: Cut, block: Block, phase: Phase) -> BatchSizes:
        return self.prices.job(cut.threads, EXACT).sizes(block, cut.micro_batch, phase, cut.prefill_chunk)

    def stored_kernels(self, cut: Cut, phase: Phase) -> list[str]:
        """Kernels for what is as stored."""
        known = self.prices.costs(cut.threads).linear.kernels(self.main_format)
        times = {kernel: self.products(cut, phase, None, kernel) for kernel in known}
        return _undominated({kernel: np.concatenate([a.ravel() for a in classes.values()]) for kernel, classes in times.items()})

    def quantized_kernels(self, cut: Cut, phase: Phase) -> list[str | None]:
        """Kernels for what is quantized; None alone where nothing is."""
        linear = self.prices.costs(cut.threads).linear
        known = dict.fromkeys(kernel for fmt in self.formats for kernel in linear.kernels(fmt))
        times = {}
        for kernel in known:
            taken = [self.quantized(cut, phase, fmt, kernel) for fmt in self.formats]
            times[kernel] = np.concatenate([a.ravel() for classes in taken for a in classes.values()])
        return list(_undominated(times)) or [None]

    def quantized(self, cut: Cut, phase: Phase, fmt: str, kernel: str | None) -> dict[TensorClass, Array]:
        """As `products`; infinite where the kernel was not measured for the format, or may not be used with it."""
        assert kernel is not None
        usable = kernel in self.prices.costs(cut.threads).linear.kernels(fmt) and self.offered.takes(kernel, fmt)
        found = self.products(cut, phase, fmt, kernel)
        return found if usable else {name: np.full_like(seconds, np.inf) for name, seconds in found.items()}

    def _rests(self, cut: Cut, kv_format: str) -> Array:
        """What is no linear layer: [blocks, steps, kinds]."""
        job = self.prices.job(cut.threads, Variant((), kv_format))
        kinds = [job.kind_of_layer[layer] for layer in self.layer_of_kind]
        found = []
        for block in self.blocks(cut):
            by_phase = {phase: self.sizes(cut, block, phase) for phase in PHASES}
            rests = [job.rest_seconds(block, by_phase["decode" if step.step else "prefill"], step.step) for step in job.steps]
            found.append([[of_step[kind] for kind in kinds] for of_step in rests])
        return np.array(found)

    def outside(self, cut: Cut, number: int, phase: Phase) -> float:
        """What a step costs outside layers and the head's product, the head in one piece."""
        job, block = self.prices.job(cut.threads, EXACT), self.blocks(cut)[number]
        sizes = self.sizes(cut, block, phase)
        return job.piece_seconds(sizes) + job.around_seconds(block, sizes)


def _undominated(times: dict[str, Array]) -> list[str]:
    """The names, quickest first, of those that are somewhere quicker than each of the others kept."""
    kept: list[str] = []
    for name in sorted(times, key=lambda name: float(np.nan_to_num(times[name], posinf=1e30).sum())):
        if not any((times[other] <= times[name]).all() for other in kept):
            kept.append(name)
    return kept
