"""Variants: the formats that a plan may keep weights and keys and values in, by class of tensors and quality class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lmoffload_solver.formats import QUALITY_BITS, format_of
from lmoffload_solver.loss import QUALITY_BOUND, Activations, LossTable, Part, allowed, loss_of
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.value import Quality, TensorClass

WEIGHT_FORMATS: Mapping[Quality, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "exact": (),
        "int8": (("int8",),),
        "int4": (("int8",), ("int4-g64", "int4-g32")),
        "any": (("int8",), ("int4-g128", "int4-g64", "int4-g32")),
    }
)
"""What a class of tensors may be turned into: of each width the first that the tensors' shapes allow and whose loss is within bounds. Of
one width larger groups take fewer bytes and are never slower, so one of them is enough."""

KV_FORMATS_OF: Mapping[Quality, tuple[str, ...]] = MappingProxyType(
    {
        "exact": ("fp32",),
        "int8": ("fp32", "bf16", "int8"),
        "int4": ("fp32", "bf16", "int8", "int4-g32"),
        "any": ("fp32", "bf16", "int8", "int4-g32"),
    }
)
"""Formats of keys and values on the host."""

WIDE_CLASSES: frozenset[TensorClass] = frozenset({"embedding", "head"})
"""Classes that are kept in 8 bits or more: a model's table and head in 4 lose about as much as all its layers do (docs/quality.md)."""

ROUNDED_ACTIVATIONS = frozenset({"int8_dot"})
"""Kernels that round activations to int8."""


def activations_of(kernel: str) -> Activations:
    """What a linear kernel rounds activations to."""
    return "int8" if kernel in ROUNDED_ACTIVATIONS else "fp32"


@dataclass(frozen=True)
class Variant:
    """What differs from the checkpoint."""

    formats: tuple[tuple[TensorClass, str], ...] = ()
    """Classes whose matrices are kept in another format than the stored one."""
    kv_format: str = "fp32"

    def of(self, model: ModelShape) -> ModelShape:
        """The model as it is kept."""
        return kept_as(model, dict(self.formats))

    @property
    def lossy_parts(self) -> int:
        """How many parts are not exact."""
        return len(self.formats) + (self.kv_format != "fp32")

    def parts(self, kernels: tuple[str, ...]) -> tuple[Part, ...]:
        """What may lose quality, when the kernels of both phases are these."""
        rounded: Activations = "int8" if any(activations_of(kernel) == "int8" for kernel in kernels) else "fp32"
        weights = {Part("weights", fmt, rounded) for _, fmt in self.formats}
        return (*sorted(weights), Part("kv", self.kv_format))

    def loss(self, table: LossTable | None, kernels: tuple[str, ...]) -> float | None:
        """The estimated loss; None where it is unknown. Formats that only some classes are kept in are taken for the whole model's."""
        return loss_of(table, *self.parts(kernels))


EXACT = Variant()
"""As the checkpoint stores it."""


@dataclass(frozen=True)
class Offered:
    """What a quality class, the machine's measurements and the model's measured losses leave to choose from."""

    weights: Mapping[TensorClass, tuple[str | None, ...]]
    """Formats of each class; None is the stored one."""
    kv: tuple[str, ...]
    quality: Quality
    losses: LossTable | None

    def takes(self, kernel: str, format_name: str) -> bool:
        """Whether a kernel may multiply weights turned into a format."""
        return allowed(self.losses, self.quality, Part("weights", format_name, activations_of(kernel)))

    def permits(self, variant: Variant, kernels: tuple[str, ...]) -> bool:
        """Whether all parts of a variant together stay within the class's bound, as far as it is known."""
        loss, bound = variant.loss(self.losses, kernels), QUALITY_BOUND.get(self.quality)
        return loss is None or bound is None or loss <= bound

    @property
    def narrowest(self) -> Variant:
        """The variant that takes the fewest bytes."""
        chosen = ((name, formats[-1]) for name, formats in self.weights.items())
        return Variant(tuple((name, fmt) for name, fmt in chosen if fmt is not None), self.kv[-1])


def offered(model: ModelShape, machine: MachineProfile, threads: tuple[int, ...], quality: Quality, losses: LossTable | None) -> Offered:
    """What may be chosen: measured with every number of threads, and allowed."""
    measured = [{curve.format for curve in machine.linear if curve.threads == count} for count in threads]
    kernels = {(curve.kernel, curve.format) for curve in machine.linear}
    attended = {curve.format for curve in machine.attention if curve.phase == "decode"}
    weights: dict[TensorClass, tuple[str | None, ...]] = {}
    for name in placed_classes(model):
        found: list[str | None] = [None]
        for width in WEIGHT_FORMATS[quality]:
            for fmt in _for_class(name, width):
                useful = any(
                    allowed(losses, quality, Part("weights", fmt, activations_of(kernel))) for kernel, known in kernels if known == fmt
                )
                if useful and _can_become(model, name, fmt) and all(fmt in known for known in measured):
                    found.append(fmt)
                    break
        weights[name] = tuple(found)
    kv = tuple(fmt for fmt in KV_FORMATS_OF[quality] if fmt == "fp32" or (fmt in attended and allowed(losses, quality, Part("kv", fmt))))
    return Offered(weights, kv, quality, losses)


def placed_classes(model: ModelShape) -> tuple[TensorClass, ...]:
    """Classes whose format is a choice: those of the layers' matrices, the head, and an embedding table of its own."""
    return tuple(dict.fromkeys(tensor.tensor_class for tensor in model.tensors if _is_choice(model, tensor)))


def kept_as(model: ModelShape, formats: Mapping[TensorClass, str]) -> ModelShape:
    """The model with the matrices of some classes in other formats."""
    if not formats:
        return model
    turned = [tensor for tensor in model.tensors if tensor.tensor_class in formats and _is_choice(model, tensor)]
    return model.with_formats({tensor.name: formats[tensor.tensor_class] for tensor in turned})


def everything_in(model: ModelShape, format_name: str) -> ModelShape | None:
    """The model with every class that can be, and may be, in a format; those of table and head in int8 where the format is narrower. None
    where no class of the layers can be. What a measured loss of weights in a format is of."""
    formats: dict[TensorClass, str] = {}
    for name in placed_classes(model):
        wanted = next(iter(_for_class(name, (format_name,))), "int8")
        if _can_become(model, name, wanted):
            formats[name] = wanted
    return kept_as(model, formats) if format_name in formats.values() else None


def _for_class(name: TensorClass, formats: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the formats that a class may be kept in."""
    return formats if name not in WIDE_CLASSES else tuple(fmt for fmt in formats if format_of(fmt).bits_per_element >= QUALITY_BITS["int8"])


def _is_choice(model: ModelShape, tensor: TensorShape) -> bool:
    return tensor.is_matrix and (tensor.layer is not None or tensor.name in (model.head.name, model.embedding.name))


def _can_become(model: ModelShape, name: TensorClass, format_name: str) -> bool:
    return all(t.can_become(format_name) for t in model.tensors if t.tensor_class == name and _is_choice(model, t))
