"""The cost model of a plan with a device as sums per step, affine in the shares: what bounds and the program are made of.

The amounts are those of `chain_work`, so that the program and the simulation never disagree on a price.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property

from lmoffload_solver import counting
from lmoffload_solver.chain_schedule import BatchWork
from lmoffload_solver.chain_work import ChainWork, StepSize
from lmoffload_solver.costs import Contention, LayerKind
from lmoffload_solver.decision import ChainBlock, Decision, Job, KVUnit
from lmoffload_solver.device_costs import DEVICE_ACTIVATION_BYTES, DeviceCosts
from lmoffload_solver.formats import QUANTIZED, stored_bytes
from lmoffload_solver.value import TensorClass, Tier

PLACES: tuple[KVUnit, ...] = (
    KVUnit("device", "device"),
    KVUnit("host", "device"),
    KVUnit("host", "host"),
    KVUnit("disk", "device"),
    KVUnit("disk", "host"),
)
"""Where keys and values may be, and who attends to them."""


@dataclass(frozen=True)
class StepTerms:
    """Seconds of one step of a block, by resource; those of KV if all of it were in a place, in the order of `PLACES`."""

    name: str
    weight: float
    """Steps of the job that it stands for."""
    device: float
    """Without attention and without dequantizing weights."""
    attend_device: tuple[float, ...]
    upload: tuple[float, ...]
    attend_host: tuple[float, ...]
    read: tuple[float, ...]
    store: tuple[float, ...]
    write: tuple[float, ...]
    load_hidden: float
    store_hidden: float
    largest_store: float
    """Seconds of a micro-batch's stores at one layer."""
    early: bool
    """A longer step came before."""
    num_batches: int


@dataclass(frozen=True)
class Sizes:
    """Bytes by class of the weights in some formats."""

    classes: dict[TensorClass, int]
    """Layers' classes, and "head"."""
    in_layers: int
    widened_bytes: int
    """16-bit copy of a layer's quantized weights."""


class ChainTerms:
    """Terms of a job on a machine under lmoffload's runtime."""

    def __init__(self, job: Job, costs: DeviceCosts) -> None:
        self.job, self.costs, self.model = job, costs, job.model
        self.layers = Counter(_numbers(job))
        self.matrices = {layer: counting.layer_matrices(self.model, layer) for layer in self.layers}
        self._work = cache(self._template)
        self.upload_rate = costs.link_rate("upload", True)
        self.contention = Contention.of(costs.machine, "upload", "host_attention")

    def _template(self, kv_format: str, hidden: Tier) -> ChainWork:
        """Prices of whatever micro-batch."""
        return ChainWork(self.job, self.costs, Decision(1, 1, {}, {}, kv_format, (), hidden, 1, self.costs.runtime))

    @cached_property
    def classes(self) -> dict[TensorClass, list[tuple[int, str, tuple[int, ...]]]]:
        """Elements, stored format and shape of every placed matrix by class; the head apart."""
        found: dict[TensorClass, list[tuple[int, str, tuple[int, ...]]]] = {}
        for tensor in self.model.tensors:
            if tensor.is_matrix and tensor.layer is not None:
                n, k = counting.matrix_size(tensor)
                found.setdefault(tensor.tensor_class, []).append((n * k, tensor.format, tensor.shape))
        return found

    def sizes(self, formats: dict[TensorClass, str]) -> Sizes:
        """Bytes of the classes of the layers in these formats (the stored one where none is named), and of the head."""
        classes: dict[TensorClass, int] = {}
        for name, tensors in self.classes.items():
            chosen = formats.get(name)
            classes[name] = sum(stored_bytes(shape, chosen or stored) for _, stored, shape in tensors)
        in_layers = sum(classes.values())
        classes["head"] = counting.tensor_bytes(self.model.head)
        widened = max(DEVICE_ACTIVATION_BYTES * self._quantized(layer, formats) for layer in self.layers)
        return Sizes(classes, in_layers, widened)

    def packed_s(self, micro_batch: int, num_micro_batches: int, formats: dict[TensorClass, str]) -> tuple[float, ...]:
        """Seconds that quantized weights add to the device's work in each sampled step, the better of widening a layer once for all
        micro-batches and of dequantizing in the products; negative where the latter read so much less."""
        work = self._work("fp16", "host")
        found = []
        for block in self.job.blocks(micro_batch, num_micro_batches):
            for step in work.steps:
                size = self._size(block, step.step)
                total = 0.0
                for layer, count in self.layers.items():
                    widening = self.costs.dequantize_s(self._quantized(layer, formats))
                    total += count * min(widening, block.num_batches * work.fusing_s(layer, size, formats)) if widening else 0.0
                found.append(total)
        return tuple(found)

    def _quantized(self, layer: int, formats: dict[TensorClass, str]) -> int:
        """Elements of a layer's quantized matrices."""
        sizes = [(*counting.matrix_size(t), formats.get(t.tensor_class)) for t in self.matrices[layer]]
        return sum(n * k for n, k, fmt in sizes if fmt in QUANTIZED)

    def _size(self, block: ChainBlock, step: int) -> StepSize:
        length = self.job.mean_length
        return StepSize(step, block.rows, length if step == 0 else 1.0, length + step)

    def steps(self, micro_batch: int, num_micro_batches: int, kv_format: str, hidden: Tier) -> tuple[StepTerms, ...]:
        """The sampled steps of all different blocks."""
        work = self._work(kv_format, hidden)
        found = []
        for number, block in enumerate(self.job.blocks(micro_batch, num_micro_batches)):
            for step in work.steps:
                early = step.step == 1
                found.append(self._terms(work, block, step.step, block.count * step.weight, f"{number}.{step.step}", early))
        return tuple(found)

    def _terms(self, work: ChainWork, block: ChainBlock, step: int, weight: float, name: str, early: bool) -> StepTerms:
        size = self._size(block, step)
        sums = [_Sum() for _ in PLACES]
        for layer, count in self.layers.items():
            for total, place in zip(sums, PLACES, strict=True):
                total.add(work.batch(layer, place, size), count * block.num_batches)
        base = min(total.device for total in sums)
        head = work.head_seconds(size) * block.num_batches
        return StepTerms(
            name,
            weight,
            base + head,
            tuple(total.device - base for total in sums),
            tuple(total.load_kv for total in sums),
            tuple(total.attend for total in sums),
            tuple(total.read for total in sums),
            tuple(total.store_kv for total in sums),
            tuple(total.write for total in sums),
            sums[0].load_hidden,
            sums[0].store_hidden,
            max(total.largest_store for total in sums),
            early,
            block.num_batches,
        )


@dataclass
class _Sum:
    """Adds up the work of micro-batches."""

    device: float = 0.0
    load_kv: float = 0.0
    load_hidden: float = 0.0
    attend: float = 0.0
    read: float = 0.0
    store_kv: float = 0.0
    store_hidden: float = 0.0
    write: float = 0.0
    largest_store: float = 0.0

    def add(self, work: BatchWork, times: int) -> None:
        self.device += times * (work.compute + work.quantize + work.after)
        self.load_kv += times * work.load_kv
        self.load_hidden += times * work.load_hidden
        self.attend += times * work.attend
        self.read += times * work.read
        self.store_kv += times * work.store_kv
        self.store_hidden += times * work.store_hidden
        self.write += times * work.write
        self.largest_store = max(self.largest_store, work.store_kv + work.store_hidden)


def _numbers(job: Job) -> list[int]:
    """Of every layer the first layer that costs the same."""
    first: dict[LayerKind, int] = {}
    return [first.setdefault(LayerKind.of(job.model, layer), layer) for layer in range(job.model.num_layers)]
