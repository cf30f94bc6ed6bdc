"""What a plan with a device may keep weights and keys and values in, and how its products take them.

On a device given by a roofline each class of matrices, keys and values are as stored or in the smallest format that the quality class
allows and the shape permits, since a smaller one costs the device the same and moves less; quantized weights are widened before the
products or in them. On one that runs the host's kernels the formats are those of machines without a device (`variants`), and of the kernels
measured for them a phase has the one that takes the job least time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lmoffload_solver import counting
from lmoffload_solver.chain_terms import ChainTerms
from lmoffload_solver.formats import FORMATS, QUANTIZED, format_of
from lmoffload_solver.loss import LossTable, Part, allowed, loss_of
from lmoffload_solver.value import Quality, TensorClass
from lmoffload_solver.variants import EXACT, Variant, offered

PRODUCTS: tuple[str, str] = ("widen", "dequantizing")

Formats: TypeAlias = tuple[tuple[TensorClass, str], ...]
"""Classes whose matrices are kept in another format than the stored one."""

SMALLEST: dict[Quality, tuple[str, ...]] = {
    "exact": (),
    "int8": ("int8",),
    "int4": ("int4-g64", "int4-g32", "int8"),
    "any": ("int4-g128", "int4-g64", "int4-g32", "int8"),
}
"""Formats that a class allows, smallest first."""


class Way(NamedTuple):
    """Formats of the weights, and how products take them."""

    formats: Formats
    products: tuple[str, str]
    beaten: npt.NDArray[np.bool_]
    """Batches for which another way is no slower in any step and takes no more memory."""


class ChainVariants(Protocol):
    """The choices of one kind of device."""

    base_kv: str
    """Format of keys and values that loses nothing."""
    kv_formats: tuple[str, ...]

    @property
    def formats(self) -> tuple[Formats, ...]:
        """Every choice of formats by class, the stored ones first."""

    def ways(self) -> Iterator[Way]:
        """All that no other beats for every batch."""

    def quickest(self, formats: Formats, phase: int) -> list[str]:
        """How products take weights in these formats in prefill (0) or decode (1), for each batch."""

    def loss(self, formats: Formats, products: tuple[str, str], kv_format: str) -> float | None:
        """The estimated loss; None where it is unknown."""

    def permits(self, formats: Formats, products: tuple[str, str], kv_format: str) -> bool:
        """Whether all parts together stay within the quality class's bound, as far as it is known."""


class RooflineVariants:
    """Of a device given by a roofline."""

    def __init__(self, terms: ChainTerms, quality: Quality, losses: LossTable | None, embedding_is_choice: bool) -> None:
        self.terms, self.model, self.quality, self.losses = terms, terms.model, quality, losses
        self._embedding_is_choice = embedding_is_choice
        main = counting.main_format(self.model)
        self.base_kv = main if main in ("bf16", "fp16") else "fp16"
        within_bounds = [fmt for fmt in SMALLEST[quality] if allowed(losses, quality, Part("kv", fmt))]
        self.kv_formats = (self.base_kv, *within_bounds[:1])

    @cached_property
    def formats(self) -> tuple[Formats, ...]:
        classes: dict[TensorClass, list[tuple[str, tuple[int, ...]]]] = {}
        head, table = self.model.head, self.model.embedding
        outside = [head] if head.name == table.name or not self._embedding_is_choice else [head, table]
        for tensor in self.model.tensors:
            if tensor.is_matrix and (tensor.layer is not None or tensor.name in {t.name for t in outside}):
                classes.setdefault(tensor.tensor_class, []).append((tensor.format, tensor.shape))
        return _choices({name: (None, *self._allowed(set(tensors))) for name, tensors in classes.items()})

    def _allowed(self, tensors: set[tuple[str, tuple[int, ...]]]) -> tuple[str, ...]:
        for fmt in SMALLEST[self.quality]:
            if not allowed(self.losses, self.quality, Part("weights", fmt)):
                continue
            block, bits = format_of(fmt).block_elements, format_of(fmt).bits_per_element
            if all(kept in FORMATS and shape[-1] % block == 0 and bits < format_of(kept).bits_per_element for kept, shape in tensors):
                return (fmt,)
        return ()

    def ways(self) -> Iterator[Way]:
        for formats in self.formats:
            if not any(fmt in QUANTIZED for name, fmt in formats if name != "embedding" or self.model.tied_head):
                yield Way(formats, ("widen", "widen"), np.zeros(len(self.terms.starts), dtype=bool))
                continue
            slower = np.stack([self.terms.packed(formats, (way, way)) for way in PRODUCTS])
            ways = {}
            for phase, rows in enumerate((slice(0, 1), slice(1, None))):
                widen = np.logical_and.reduceat((slower[0, rows] <= slower[1, rows]).all(axis=0), self.terms.starts)
                fused = np.logical_and.reduceat((slower[1, rows] <= slower[0, rows]).all(axis=0), self.terms.starts)
                ways[phase] = {"widen": fused & ~widen, "dequantizing": widen}
            least_memory = ~ways[0]["dequantizing"] & ~ways[1]["dequantizing"]
            for products in product(PRODUCTS, PRODUCTS):
                beaten = ways[0][products[0]] | ways[1][products[1]] | least_memory
                yield Way(formats, products, np.zeros_like(beaten) if products == ("dequantizing", "dequantizing") else beaten)

    def quickest(self, formats: Formats, phase: int) -> list[str]:
        return [PRODUCTS[0]] * len(self.terms.starts)

    def loss(self, formats: Formats, products: tuple[str, str], kv_format: str) -> float | None:
        """Keys and values in 16 bits count as exact."""
        parts = [Part("weights", fmt) for fmt in sorted({fmt for _, fmt in formats})]
        return loss_of(self.losses, *parts, *([Part("kv", kv_format)] if kv_format != self.base_kv else []))

    def permits(self, formats: Formats, products: tuple[str, str], kv_format: str) -> bool:
        return True


class KernelVariants:
    """Of a device that runs the host's kernels."""

    base_kv = EXACT.kv_format

    def __init__(self, terms: ChainTerms, quality: Quality, losses: LossTable | None, embedding_is_choice: bool) -> None:
        self.terms, self.model, self.losses = terms, terms.model, losses
        threads = terms.cores.device_threads
        self._kernels = [{(c.kernel, c.format) for c in terms.machine.linear if c.threads == count} for count in threads]
        self.offered = offered(terms.model, terms.machine, threads, quality, losses)
        self.kv_formats = self.offered.kv
        own_table = None if self.model.tied_head or embedding_is_choice else self.model.embedding.tensor_class
        self.formats = _choices({name: (None,) if name == own_table else found for name, found in self.offered.weights.items()})

    def ways(self) -> Iterator[Way]:
        for formats in self.formats:
            quickest = [self.quickest(formats, phase) for phase in (0, 1)]
            for products in dict.fromkeys(zip(*quickest, strict=True)):
                if self.permits(formats, products, self.base_kv):
                    taken = [(np.array(names) == name) for names, name in zip(quickest, products, strict=True)]
                    yield Way(formats, products, ~(taken[0] & taken[1]))

    def quickest(self, formats: Formats, phase: int) -> list[str]:
        names = self._named(formats)
        rows = slice(0, 1) if phase == 0 else slice(1, None)
        seconds = []
        for name in names:
            weighed = (self.terms.packed(formats, (name, name), self.terms.devices[-1]) * self.terms.weight)[rows].sum(axis=0)
            seconds.append(np.add.reduceat(weighed, self.terms.starts))
        return [names[number] for number in np.argmin(seconds, axis=0)]

    def _named(self, formats: Formats) -> list[str]:
        """Kernels of the model's main stored format, each with one of the quantized formats where there are such."""
        stored = self._measured(counting.main_format(self.model))
        kinds = {fmt for _, fmt in formats}
        if not kinds:
            return stored
        taken = [{kernel for kernel in self._measured(fmt) if self.offered.takes(kernel, fmt)} for fmt in kinds]
        packed = [kernel for kernel in self._measured(next(iter(kinds))) if all(kernel in one for one in taken)]
        return [f"{kernel}+{plain}" for kernel, plain in product(packed, stored)]

    def _measured(self, format_name: str) -> list[str]:
        """Kernels measured for a format with every number of threads."""
        known = [[kernel for kernel, fmt in one if fmt == format_name] for one in self._kernels]
        return sorted(kernel for kernel in known[0] if all(kernel in one for one in known))

    def loss(self, formats: Formats, products: tuple[str, str], kv_format: str) -> float | None:
        return Variant(formats, kv_format).loss(self.losses, _names(products))

    def permits(self, formats: Formats, products: tuple[str, str], kv_format: str) -> bool:
        return self.offered.permits(Variant(formats, kv_format), _names(products))


def variants_of(terms: ChainTerms, quality: Quality, losses: LossTable | None, embedding_is_choice: bool) -> ChainVariants:
    """The choices of a machine's device. An embedding table of its own costs no time, and its format is a choice only where the host could
    be short of memory."""
    if terms.shares_cores:
        return KernelVariants(terms, quality, losses, embedding_is_choice)
    return RooflineVariants(terms, quality, losses, embedding_is_choice)


def _names(products: tuple[str, str]) -> tuple[str, ...]:
    return tuple(name for of_phase in products for name in of_phase.split("+"))


def _choices(classes: Mapping[TensorClass, tuple[str | None, ...]]) -> tuple[Formats, ...]:
    chosen = product(*([(name, fmt) for fmt in found] for name, found in classes.items()))
    return tuple(tuple((name, fmt) for name, fmt in one if fmt is not None) for one in chosen)
