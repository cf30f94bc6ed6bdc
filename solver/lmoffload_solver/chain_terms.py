"""The cost model of a plan with a device as sums per step, affine in the shares: what bounds and the program are made of.

The amounts are those of `chain_prices`, taken of every batch of the domain at once, so that bounds, program and simulation never disagree
on a price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lmoffload_solver import counting
from lmoffload_solver.chain_prices import BatchPrices
from lmoffload_solver.costs import Contention
from lmoffload_solver.decision import ChainBlock, Job, KVUnit
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.formats import stored_bytes
from lmoffload_solver.host_cores import HostCores, HostShare
from lmoffload_solver.lengths import Amount
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.runtime import own_runtime
from lmoffload_solver.value import TaskClass, TensorClass

Array = npt.NDArray[np.float64]

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
    """Seconds of steps of blocks, by resource. Arrays over steps (and batches of the domain); those of KV have a last axis in the order of
    `PLACES`: the seconds if all of it were in that place."""

    names: tuple[str, ...]
    weight: Array
    """Steps of the job that each stands for."""
    early: npt.NDArray[np.bool_]
    """What is moved may have been moved ahead, while the step before computed: decode steps that stand for themselves alone."""
    num_batches: Array
    device: Array
    """Without attention, and over 16-bit weights at hand."""
    attend_device: Array
    upload: Array
    attend_host: Array
    attend_upload: Array
    """What of `attend_host` carries its output up."""
    read: Array
    store: Array
    write: Array
    load_hidden: Array
    store_hidden: Array
    largest_store: Array
    """Seconds of a micro-batch's stores at one layer."""


@dataclass(frozen=True)
class Sizes:
    """Bytes by class of the weights in some formats."""

    classes: dict[TensorClass, int]
    """Layers' classes, and "head"."""
    in_layers: int

    @property
    def total(self) -> int:
        return sum(self.classes.values())


class ChainTerms:
    """Terms of a job on a machine under lmoffload's runtime, for batches (micro-batch, number of micro-batches)."""

    def __init__(self, job: Job, machine: MachineProfile, disk: Disk, pairs: Sequence[tuple[int, int]], threads: int | None = None) -> None:
        self.job, self.machine, self.disk, self.model = job, machine, disk, job.model
        self.cores = HostCores.of(machine, disk, threads)
        self.assignments = tuple(self.cores.assignments())
        self.costs = DeviceCosts(machine, disk, own_runtime())
        self.shares_cores = bool(self.cores.device_threads)
        """The device computes on the host's cores, so that its times depend on the threads too."""
        computing = [threads["compute"] for threads in self.assignments]
        self._same_device = [computing.index(count) for count in computing]
        """For every assignment the first that gives the device as much."""
        self.devices: tuple[int | None, ...] = tuple(sorted(set(self._same_device))) if self.shares_cores else (None,)
        """Assignments that differ in what they give the device, the most last; None: it has its own."""
        self.num_devices = self.costs.num_devices
        """Accelerators: what each does is counted as if work were split evenly, which no split is quicker than."""
        self.layers = Counter(job.kinds)
        blocks = [list(job.blocks(*pair)) for pair in pairs]
        ends = np.cumsum([0, *map(len, blocks)]).tolist()
        self.places = {pair: (begin, end) for pair, begin, end in zip(pairs, ends[:-1], ends[1:], strict=True)}
        self.starts = np.array(ends[:-1], dtype=np.intp)
        flat = [block for of_pair in blocks for block in of_pair]
        self.blocks = ChainBlock(*(np.array([getattr(b, name) for b in flat], dtype=np.float64) for name in ChainBlock.__annotations__))
        self.numbers = [number for of_pair in blocks for number in range(len(of_pair))]
        self._most_streams = [pair[1] for pair, of_pair in zip(pairs, blocks, strict=True) for _ in of_pair]
        self.weight: Array = np.asarray(np.array([[step.weight] for step in job.steps]) * self.blocks.count)
        self.upload_rate = self.num_devices * self.costs.link_rate("upload", True)
        """Of all links."""
        self.contention = self.costs.contention.get(("upload", "host_attention"), Contention())
        """Of uploads and the host's attention, under every assignment of threads."""
        self.costs_with = cache(self._costs_with)
        self.least_steps = cache(self._least_steps)
        self.steps, self.packed, self.sizes = cache(self._steps), cache(self._packed), cache(self._sizes)
        self.of_pair, self.read_rate, self.attention_shares = cache(self._of_pair), cache(self._read_rate), cache(self._attention_shares)

    @cached_property
    def classes(self) -> dict[TensorClass, list[tuple[str, tuple[int, ...]]]]:
        """Stored format and shape of every matrix of the layers, by class."""
        found: dict[TensorClass, list[tuple[str, tuple[int, ...]]]] = {}
        for tensor in self.model.tensors:
            if tensor.is_matrix and tensor.layer is not None:
                found.setdefault(tensor.tensor_class, []).append((tensor.format, tensor.shape))
        return found

    def _sizes(self, formats: tuple[tuple[TensorClass, str], ...]) -> Sizes:
        """Bytes of the classes of the layers in these formats (the stored one where none is named), and of the head."""
        chosen, classes = dict(formats), dict[TensorClass, int]()
        for name, tensors in self.classes.items():
            classes[name] = sum(times * stored_bytes(shape, chosen.get(name) or fmt) for (fmt, shape), times in Counter(tensors).items())
        in_layers = sum(classes.values())
        classes["head"] = counting.tensor_bytes(self.model.head, chosen.get(self.model.head.tensor_class))
        return Sizes(classes, in_layers)

    def share(self, threads: dict[TaskClass, int] | None) -> HostShare:
        """What threads leave of the host's rates, for every batch; None: the most that any assignment leaves of each."""
        if threads is None:
            shares = [self.share(one) for one in self.assignments]
            return HostShare(np.maximum.reduce([one.attention for one in shares]), max(one.read_bytes_per_s or 0.0 for one in shares))
        by_streams = {count: self.cores.share(threads, count) for count in set(self._most_streams)}
        attention = np.array([by_streams[count].attention for count in self._most_streams])
        return replace(next(iter(by_streams.values())), attention=attention)

    def _costs_with(self, assignment: int | None) -> DeviceCosts:
        """Prices under an assignment of threads, of every batch."""
        return DeviceCosts(self.machine, self.disk, self.costs.runtime, self.share(self._threads(assignment)))

    def _attention_shares(self, num_micro_batches: int) -> tuple[float, ...]:
        """Rate of the host's attention over the profile's, under each assignment of threads."""
        return tuple(float(self.cores.share(threads, num_micro_batches).attention) for threads in self.assignments)

    def worth_trying(self, num_micro_batches: int) -> tuple[list[int], list[int]]:
        """Assignments of threads for plans in which the device alone attends, where threads only read; and for those in which the host does
        too. Among those that leave the device the same, what others exceed is left out."""
        alone: list[int] = []
        both: list[int] = []
        by_device: dict[int, list[int]] = {}
        for number, threads in enumerate(self.assignments):
            by_device.setdefault(threads["compute"] if self.shares_cores else 0, []).append(number)
        shares = self.attention_shares(num_micro_batches)
        for numbers in by_device.values():
            alone.append(max(numbers, key=self.read_rate))
            # What attends on cores that the device shares slows it: more of it is not always better.
            pairs = [(self.read_rate(number), shares[number]) for number in numbers]
            both += numbers if self.shares_cores else [numbers[place] for place in _undominated(pairs)]
        return alone, both

    def _read_rate(self, assignment: int | None) -> float:
        """Bytes per second of the disk under an assignment of threads; 0 where it has none."""
        return float(self.share(self._threads(assignment)).read_bytes_per_s or 0.0)

    def _threads(self, assignment: int | None) -> dict[TaskClass, int] | None:
        return None if assignment is None else self.assignments[assignment]

    def _packed(self, formats: tuple[tuple[TensorClass, str], ...], products: tuple[str, str], assignment: int | None = None) -> Array:
        """Seconds that formats of the weights and ways of the products add to the device's work, by step and batch: what is widened once
        for all micro-batches, or what products take longer; negative where they take less."""
        if assignment is not None and self._same_device[assignment] != assignment:
            return self.packed(formats, products, self._same_device[assignment])
        costs = self.costs_with(assignment) if self.shares_cores else self.costs
        prices, chosen = BatchPrices(self.job, costs, "fp16", "device"), dict(formats)
        groups: list[tuple[int | None, int]] = [*self.layers.items(), (None, 1)]
        found: Array = np.zeros(self.weight.shape)
        for row, step in enumerate(self.job.steps):
            if row > 1:
                found[row] = found[1]  # all decode steps compute as many rows
                continue
            size, way = self.job.size(self.blocks, step.step), products[min(1, step.step)]
            for layer, count in groups:
                if costs.processing.in_products(way):
                    found[row] += count * self.blocks.num_batches * prices.gain_s(layer, size, chosen, way)
                else:
                    found[row] += count * prices.widening_s(layer, chosen)
        return np.asarray(found * self._device_share(costs))

    def _device_share(self, costs: DeviceCosts) -> Amount:
        """Of the time that one accelerator would take alone, what they take together."""
        return costs.share.among_devices / self.num_devices

    def _steps(self, kv_format: str, assignment: int | None = None) -> StepTerms:
        """Steps × batches, hidden states on the host; `assignment` of `assignments`, None: the best of all for each resource."""
        costs = self.costs_with(assignment)
        prices = BatchPrices(self.job, costs, kv_format, "host")
        shape = self.weight.shape
        sums = {name: np.zeros((*shape, len(PLACES))) for name in ("device", "upload", "attend", "output", "read", "store", "write")}
        hidden = {name: np.zeros(shape) for name in ("load", "store", "largest", "head")}
        times = self.blocks.num_batches
        crossings = 1 - 1 / self.model.num_layers if self.shares_cores else 1.0
        for row, step in enumerate(self.job.steps):
            size = self.job.size(self.blocks, step.step)
            hidden["head"][row] = prices.head_s(size) * times
            for layer, count in self.layers.items():
                for place, unit in enumerate(PLACES):
                    work = prices.batch(layer, "layer", unit, size)
                    many = count * times
                    sums["device"][row, :, place] += many * (work.compute + work.quantize + work.after)
                    sums["upload"][row, :, place] += many * work.load_kv
                    sums["attend"][row, :, place] += many * work.attend
                    if unit.attends == "host" and step.step:
                        sums["output"][row, :, place] += many * costs.attention_output_s(self.model.layers[layer], size.rows)
                    sums["read"][row, :, place] += many * work.read
                    sums["store"][row, :, place] += many * work.store_kv
                    sums["write"][row, :, place] += many * work.write
                    hidden["largest"][row] = np.maximum(hidden["largest"][row], work.store_kv + work.store_hidden)
                hidden["load"][row] += many * crossings * work.load_hidden
                hidden["store"][row] += many * crossings * work.store_hidden
        sums["device"] *= self._device_share(costs)
        hidden["head"] *= self._device_share(costs)
        moved: tuple[tuple[dict[str, Array], tuple[str, ...]], ...] = ((sums, ("upload", "store")), (hidden, ("load", "store")))
        for amounts, names in moved:
            for name in names:
                amounts[name] /= self.num_devices
        base = sums["device"].min(axis=2)
        early = np.zeros(shape, dtype=bool)
        early[1:] = np.array([[step.weight <= 1] for step in self.job.steps[1:]], dtype=bool).reshape(-1, 1)
        names = tuple(f"{step.step}" for step in self.job.steps)
        return StepTerms(
            names,
            self.weight,
            early,
            # The steps of several accelerators overlap, so that a step takes no micro-batch's own way.
            np.broadcast_to(times if self.num_devices == 1 else np.inf, shape),
            base + hidden["head"],
            sums["device"] - base[:, :, None],
            sums["upload"],
            sums["attend"],
            sums["output"],
            sums["read"],
            sums["store"],
            sums["write"],
            hidden["load"],
            hidden["store"],
            hidden["largest"],
        )

    def _least_steps(self, kv_format: str, device: int | None) -> StepTerms:
        """What no assignment with this much for the device goes below."""
        if device is None:
            return self.steps(kv_format)
        return least_of([self.steps(kv_format, number) for number, same in enumerate(self._same_device) if same == device])

    def _of_pair(self, pair: tuple[int, int], kv_format: str, hidden_moves: bool, assignment: int) -> StepTerms:
        """The steps of one batch's blocks, one after another."""
        begin, end = self.places[pair]
        table = self.steps(kv_format, assignment)

        def cut(values: Any) -> Any:
            part = values[:, begin:end]
            return np.ascontiguousarray(part.swapaxes(0, 1)).reshape(-1, *part.shape[2:])

        arrays = {name: cut(getattr(table, name)) for name in StepTerms.__annotations__ if name != "names"}
        if not hidden_moves:
            arrays["load_hidden"] = arrays["store_hidden"] = np.zeros(len(arrays["device"]))
        names = tuple(f"{number}.{step}" for number in self.numbers[begin:end] for step in table.names)
        return StepTerms(names, **arrays)

    def packed_of_pair(
        self, pair: tuple[int, int], formats: tuple[tuple[TensorClass, str], ...], products: tuple[str, str], assignment: int
    ) -> Array:
        """`packed` of one batch, in the order of `of_pair`."""
        begin, end = self.places[pair]
        packed = self.packed(formats, products, assignment if self.shares_cores else None)
        return np.asarray(packed[:, begin:end].T.reshape(-1))


SECONDS = (
    "device", "attend_device", "upload", "attend_host", "attend_upload", "read", "store", "write", "load_hidden", "store_hidden",
)  # fmt: skip


def least_of(tables: Sequence[StepTerms]) -> StepTerms:
    """What no table goes below."""
    least = {name: np.minimum.reduce([getattr(table, name) for table in tables]) for name in SECONDS}
    largest = np.maximum.reduce([table.largest_store for table in tables])
    return replace(tables[0], largest_store=largest, **least)


def _undominated(pairs: list[tuple[float, float]]) -> Iterator[int]:
    """Numbers of the pairs that no other exceeds or equals in both; of equal ones the first."""
    for number, (first, second) in enumerate(pairs):
        others = [pair for place, pair in enumerate(pairs) if pair != (first, second) or place < number]
        if not any(a >= first and b >= second for a, b in others):
            yield number
