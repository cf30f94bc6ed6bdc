"""Bytes of every tier at the peak of a plan with a device, in named parts.

Homes (weights, KV, hidden states of the whole block) add up, and so do the buffers of what is in flight; a layer's temporaries and the
logits take the maximum. The peak is that of the first, largest block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.accelerator import Accelerator, EmulatedDevice
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.lengths import Amount
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.pipeline import Pipeline
from lmoffload_solver.roofline_processing import DEVICE_ACTIVATION_BYTES, kv_bytes, kv_elements
from lmoffload_solver.value import TensorClass, Tier
from lmoffload_solver.workload import Limits

BUFFERS = 2
"""Of keys and values, and of hidden states, on their way."""

LOGITS_COPIES = 3
"""16-bit logits, their 32-bit copy for sampling."""


@dataclass(frozen=True)
class Transients:
    """What does not depend on the placement."""

    device: dict[str, Amount]
    host: dict[str, Amount]


@dataclass(frozen=True)
class KVBuffers:
    """Bytes of the buffers of keys and values on their way: of prompts', which the device computes and stores, and of all tokens'."""

    prompts: float
    whole: float

    def of(self, unit: KVUnit) -> dict[Tier, float]:
        """What keys and values in a place need: those on disk stay a while on the host, those that the device attends to on the device."""
        if unit.home == "device":
            return {}
        on_device = self.prompts if unit.attends == "host" else self.whole
        return {"device": on_device, "host": self.whole} if unit.home == "disk" else {"device": on_device}


class ChainMemory:
    """Memory of a job on a machine with a device of its own."""

    head_in_pieces = False
    base_kv = "fp16"
    """As wide as a format of keys and values gets."""

    def __init__(self, job: Job, machine: MachineProfile, limits: Limits) -> None:
        self.job, self.machine, self.model = job, machine, job.model
        assert machine.accelerator is not None
        self.num_devices = machine.accelerator.count
        self.reserved = machine.accelerator.reserved_bytes if isinstance(machine.accelerator, Accelerator) else 0
        device, host = machine.accelerator.memory_bytes, machine.host.memory_usable_bytes
        self.capacity: dict[Tier, int] = {
            "device": device if limits.device_memory_bytes is None else min(device, limits.device_memory_bytes),
            "host": host if limits.host_memory_bytes is None else min(host, limits.host_memory_bytes),
            "disk": machine.disks[0].free_bytes if limits.disk_space_bytes is None else limits.disk_space_bytes,
        }
        self.weights_capacity = _granted(limits, counting.weights_bytes(self.model))
        """For homes and buffers of weights on devices and host together."""
        tokens = job.longest + job.gen_len
        self._largest_kv = max(kv_elements(shape, counting.kv_tokens(shape, tokens)) for shape in self.model.layers)
        self.widened = cache(self._widened_weights)
        self.kv_token_bytes, self.kv_buffers = cache(self._kv_token_bytes), cache(self._kv_buffers)
        self.vectors = counting.vector_bytes(self.model) * DEVICE_ACTIVATION_BYTES // counting.ACTIVATION_BYTES

    def room_bytes(self, tensor: TensorShape, num_bytes: int) -> int:
        """What a tensor kept in `num_bytes` takes of a memory."""
        return num_bytes

    def _kv_token_bytes(self, kv_format: str) -> float:
        """Bytes of a sequence's keys and values over all layers when it is finished."""
        return sum(self._kv_bytes(shape, kv_format, self.job.gen_len) for shape in self.model.layers)

    def _kv_bytes(self, shape: LayerShape, kv_format: str, new_tokens: int) -> float:
        return float(kv_bytes(shape, counting.kv_tokens(shape, self.job.longest + new_tokens), kv_format))

    def _kv_buffers(self, rows: int, kv_format: str) -> KVBuffers:
        """For micro-batches of `rows` sequences."""
        most = max(self._kv_bytes(shape, kv_format, self.job.gen_len) for shape in self.model.layers)
        prompts = max(self._kv_bytes(shape, kv_format, 0) for shape in self.model.layers)
        return KVBuffers(BUFFERS * rows * prompts, BUFFERS * rows * most)

    def rows(self, decision: Decision) -> tuple[int, int]:
        """(rows of the first micro-batch, rows of the first block)."""
        rows = min(decision.micro_batch, self.job.num_prompts)
        return rows, min(decision.block_rows, self.job.num_prompts)

    def work_bytes(self, rows: Amount, *, eager: bool) -> Amount:
        """See `work_bytes`."""
        return work_bytes(self.model, rows, self.job.longest, eager=eager)

    def hidden_bytes(self, rows: Amount) -> Amount:
        """Hidden states of prompts."""
        return DEVICE_ACTIVATION_BYTES * rows * self.job.longest * self.model.hidden_size

    def transients(self, rows: Amount, block: Amount, hidden: Tier, kv_format: str, widened: Amount, *, eager: bool = False) -> Transients:
        """Everything but homes and buffers of weights and KV, for micro-batches of `rows` and blocks of `block` sequences, with `widened`
        elements of weights in a 16-bit copy."""
        on_device = hidden == "device"
        widened_kv = rows * self._largest_kv if kv_format in QUANTIZED else 0
        device = {
            "reserved": self.reserved,
            "vectors": self.vectors,
            "hidden": self.hidden_bytes(block) if on_device else 2 * BUFFERS * self.hidden_bytes(rows),
            "work": self.work_bytes(rows, eager=eager),
            "widened": DEVICE_ACTIVATION_BYTES * (widened + widened_kv),
        }
        return Transients(device, {"base": self.machine.base_bytes, "hidden": self.parked_bytes(block, hidden)})

    def parked_bytes(self, block: Amount, hidden: Tier) -> Amount:
        """Hidden states on the host: at home there, or on their way between accelerators."""
        return 0 if hidden == "device" and self.num_devices == 1 else self.hidden_bytes(block)

    def parts(self, decision: Decision) -> dict[Tier, dict[str, int]]:
        """The named parts of the peak of each tier; the device's are those of the fullest accelerator."""
        return self._together(decision, [self._stage(decision, stage) for stage in range(decision.pipeline.num_stages)])

    def parts_beside_weights(self, decision: Decision) -> dict[Tier, dict[str, int]]:
        """The same but for homes and buffers of weights, which need not be placed yet."""
        return self._together(decision, [self.stage_beside_weights(decision, stage) for stage in range(decision.pipeline.num_stages)])

    def stage_beside_weights(self, decision: Decision, stage: int) -> dict[Tier, dict[str, int]]:
        """What one accelerator has in each tier, but for weights; what its host has for all is left out."""
        kv, buffers = self._kv(decision, decision.pipeline.layers_of(stage, self.model.num_layers))
        amounts: dict[Tier, dict[str, Amount]] = {
            "device": {**self._transients_of(decision).device, "kv buffers": buffers["device"], "kv": kv["device"]},
            "host": {"kv buffers": buffers["host"], "kv": kv["host"]},
            "disk": {"kv": kv["disk"]},
        }
        return {tier: _rounded(named) for tier, named in amounts.items()}

    def _stage(self, decision: Decision, stage: int) -> dict[Tier, dict[str, int]]:
        parts = self.stage_beside_weights(decision, stage)
        groups = self.groups_of(decision.pipeline, stage)
        homes: Counter[Tier] = Counter()
        for tensor in (tensor for group in groups for tensor in group):
            homes[decision.homes[tensor.name]] += self._room_of(tensor, decision)
        for tier, named in parts.items():
            named["weights"] = homes[tier]
        streamed, staged = self.largest_streams(decision, stage)
        parts["device"]["weight buffers"] = decision.num_buffers * streamed
        parts["host"]["weight buffers"] = decision.num_buffers * staged
        return parts

    def _together(self, decision: Decision, stages: Sequence[dict[Tier, dict[str, int]]]) -> dict[Tier, dict[str, int]]:
        host, disk = (Counter[str](), Counter[str]())
        for stage in stages:
            host.update(stage["host"])
            disk.update(stage["disk"])
        fullest = max((stage["device"] for stage in stages), key=lambda named: sum(named.values()))
        return {"device": fullest, "host": {**_rounded(self._transients_of(decision).host), **host}, "disk": dict(disk)}

    def _transients_of(self, decision: Decision) -> Transients:
        eager = decision.runtime.attending == "eager"
        return self.transients(*self.rows(decision), decision.hidden, decision.kv_format, self.widened_by(decision), eager=eager)

    def groups_of(self, pipeline: Pipeline, stage: int) -> list[list[TensorShape]]:
        """The matrices that a stage has: of each of its layers, and what belongs to no layer at the last stage, the output head first."""
        layers = pipeline.layers_of(stage, self.model.num_layers)
        groups = [list(counting.layer_matrices(self.model, layer)) for layer in layers]
        if stage == pipeline.num_stages - 1:
            head = self.model.head
            others = [t for t in self.model.tensors if t.is_matrix and t.layer is None and t.name != head.name]
            groups.append([head, *others])
        return groups

    def peaks(self, decision: Decision) -> dict[Tier, int]:
        """Bytes of each tier at the peak; of the device's, the fullest accelerator's."""
        return {tier: sum(parts.values()) for tier, parts in self.parts(decision).items()}

    def fits(self, decision: Decision) -> bool:
        """Whether every tier holds its peak, and weights are within their limit."""
        within = all(size <= self.capacity[tier] for tier, size in self.peaks(decision).items())
        return within and self.weights_memory(decision) <= self.weights_capacity

    def weights_memory(self, decision: Decision) -> int:
        """Bytes of weights on devices and host: homes, buffers and vectors."""
        stages = [self._stage(decision, stage) for stage in range(decision.pipeline.num_stages)]
        tiers: tuple[Tier, ...] = ("device", "host")
        return sum(parts[tier]["weights"] + parts[tier]["weight buffers"] for parts in stages for tier in tiers) + self.vectors

    def largest_streams(self, decision: Decision, stage: int = 0) -> tuple[int, int]:
        """Bytes of the largest layer (or head) of a stage that (goes up, comes from disk)."""
        pipeline = decision.pipeline
        layers = pipeline.layers_of(stage, self.model.num_layers)
        sizes = [self._streams(counting.layer_matrices(self.model, layer), decision) for layer in layers]
        if stage == pipeline.num_stages - 1:
            sizes.append(self._head_streams(decision))
        return max(size for size, _ in sizes), max(size for _, size in sizes)

    def _streams(self, tensors: Sequence[TensorShape], decision: Decision) -> tuple[int, int]:
        away = [(decision.homes[t.name], self._room_of(t, decision)) for t in tensors if decision.homes[t.name] != "device"]
        return sum(size for _, size in away), sum(size for home, size in away if home == "disk")

    def _head_streams(self, decision: Decision) -> tuple[int, int]:
        return self._streams((self.model.head,), decision)

    def _room_of(self, tensor: TensorShape, decision: Decision) -> int:
        return self.room_bytes(tensor, decision.tensor_bytes(tensor))

    def widened_by(self, decision: Decision) -> int:
        """Elements of weights that a decision keeps a 16-bit copy of: the quantized ones of a layer or the head, or, copied for each
        micro-batch, of a matrix; none where all products take them as they are kept."""
        if decision.prefill_products == decision.decode_products == "dequantizing":
            return 0
        return self.widened(tuple(decision.formats.items()), decision.runtime.dequantizes_per == "block")

    def _widened_weights(self, formats: tuple[tuple[TensorClass, str], ...], whole: bool) -> int:
        chosen = dict(formats)
        largest = 0
        groups = [counting.layer_matrices(self.model, layer) for layer in range(self.model.num_layers)]
        for matrices in [*groups, (self.model.head,)]:
            tensors = [t for t in matrices if chosen.get(t.tensor_class) in QUANTIZED]
            sizes = [counting.matrix_size(t)[0] * counting.matrix_size(t)[1] for t in tensors]
            largest = max(largest, sum(sizes) if whole else max(sizes, default=0))
        return largest

    def _kv(self, decision: Decision, layers_here: range) -> tuple[dict[Tier, float], dict[Tier, float]]:
        """Homes of some layers' keys and values of the first block, and buffers of what is on its way, per tier."""
        rows, block = self.rows(decision)
        homes: dict[Tier, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
        buffers: dict[Tier, float] = {"device": 0.0, "host": 0.0}
        needed = self.kv_buffers(rows, decision.kv_format)
        here = slice(layers_here.start, layers_here.stop)
        for (shape, units), layers in Counter(zip(self.model.layers[here], decision.kv[here], strict=True)).items():
            one = self._kv_bytes(shape, decision.kv_format, self.job.gen_len)
            for number, unit in enumerate(units):
                homes[unit.home] += layers * max(0, min(rows, block - number * rows)) * one
            for unit in set(units):
                for tier, size in needed.of(unit).items():
                    buffers[tier] = max(buffers[tier], size)
        return homes, buffers


def _rounded(amounts: Mapping[str, Amount]) -> dict[str, int]:
    return {name: round(amount) for name, amount in amounts.items()}


def work_bytes(model: ModelShape, rows: Amount, length: int, *, eager: bool) -> Amount:
    """Temporaries of a layer over a micro-batch's prompts of `length` tokens, or its logits: copies of the hidden state, query, key, value
    and attention's output, or the MLP's products; operator by operator also all scores, twice."""
    attention = max(2 * s.num_heads * s.key_dim + s.num_kv_heads * (s.key_dim + s.value_dim) for s in model.layers)
    layer = rows * length * (2 * model.hidden_size + max(attention, 2 * model.intermediate_size))
    scores = 2 * rows * max(s.num_heads for s in model.layers) * length * length if eager else 0
    return DEVICE_ACTIVATION_BYTES * np.maximum(layer + scores, LOGITS_COPIES * rows * model.vocab_size)


def memory_of(job: Job, machine: MachineProfile, limits: Limits) -> ChainMemory:
    """Memory of a job on a machine with a device, its own or an emulated one."""
    from lmoffload_solver.arena_memory import ArenaMemory

    return ArenaMemory(job, machine, limits) if isinstance(machine.accelerator, EmulatedDevice) else ChainMemory(job, machine, limits)


def _granted(limits: Limits, weights_bytes: int) -> float:
    """Bytes that the user grants weights."""
    granted = inf if limits.weights_memory_bytes is None else float(limits.weights_memory_bytes)
    return granted if limits.weights_memory_share is None else min(granted, limits.weights_memory_share * weights_bytes)
