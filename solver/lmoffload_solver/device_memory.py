"""Bytes of every tier at the peak of a plan with a device, in named parts.

Homes (weights, KV, hidden states of the whole block) add up, and so do the buffers of what is in flight; a layer's temporaries and the
logits take the maximum. The peak is that of the first, largest block.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from lmoffload_solver import counting
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.device_costs import DEVICE_ACTIVATION_BYTES, kv_bytes, kv_elements
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.value import TensorClass, Tier
from lmoffload_solver.workload import Limits

BUFFERS = 2
"""Of keys and values, and of hidden states, on their way."""

LOGITS_COPIES = 3
"""16-bit logits, their 32-bit copy for sampling."""


@dataclass(frozen=True)
class Transients:
    """What does not depend on the placement."""

    device: dict[str, int]
    host: dict[str, int]


class ChainMemory:
    """Memory of a job on a machine with a device."""

    def __init__(self, job: Job, machine: MachineProfile, limits: Limits) -> None:
        self.job, self.machine, self.model = job, machine, job.model
        assert machine.accelerator is not None
        device, host = machine.accelerator.memory_bytes, machine.host.memory_usable_bytes
        self.capacity: dict[Tier, int] = {
            "device": device if limits.device_memory_bytes is None else min(device, limits.device_memory_bytes),
            "host": host if limits.host_memory_bytes is None else min(host, limits.host_memory_bytes),
            "disk": machine.disks[0].free_bytes if limits.disk_space_bytes is None else limits.disk_space_bytes,
        }
        self._largest_kv = max(kv_elements(shape, job.longest + job.gen_len) for shape in self.model.layers)
        self._attention = max(2 * s.num_heads * s.key_dim + s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.model.layers)
        self._heads = max(s.num_heads for s in self.model.layers)
        self.widened = cache(self._widened_weights)
        self.vectors = counting.vector_bytes(self.model) * DEVICE_ACTIVATION_BYTES // counting.ACTIVATION_BYTES

    def kv_token_bytes(self, kv_format: str) -> float:
        """Bytes of a sequence's keys and values over all layers when it is finished."""
        tokens = self.job.longest + self.job.gen_len
        return sum(kv_bytes(shape, tokens, kv_format) for shape in self.model.layers)

    def rows(self, decision: Decision) -> tuple[int, int]:
        """(rows of the first micro-batch, rows of the first block)."""
        rows = min(decision.micro_batch, self.job.num_prompts)
        return rows, min(decision.block_rows, self.job.num_prompts)

    def work_bytes(self, rows: int, *, eager: bool) -> int:
        """Temporaries of a layer over a micro-batch's prompts, or its logits: copies of the hidden state, query, key, value and attention's
        output, or the MLP's products; operator by operator also all scores, twice."""
        model, length = self.model, self.job.longest
        layer = rows * length * (2 * model.hidden_size + max(self._attention, 2 * model.intermediate_size))
        scores = 2 * rows * self._heads * length * length if eager else 0
        return DEVICE_ACTIVATION_BYTES * max(layer + scores, LOGITS_COPIES * rows * model.vocab_size)

    def hidden_bytes(self, rows: int) -> int:
        """Hidden states of prompts."""
        return DEVICE_ACTIVATION_BYTES * rows * self.job.longest * self.model.hidden_size

    def transients(self, decision: Decision) -> Transients:
        """Everything but homes and buffers of weights and KV."""
        rows, block = self.rows(decision)
        assert self.machine.accelerator is not None
        on_device = decision.hidden == "device"
        device = {
            "reserved": self.machine.accelerator.reserved_bytes,
            "vectors": self.vectors,
            "hidden": self.hidden_bytes(block) if on_device else 2 * BUFFERS * self.hidden_bytes(rows),
            "work": self.work_bytes(rows, eager=decision.runtime.attending == "eager"),
            "widened": self._widened(decision, rows),
        }
        return Transients(device, {"base": self.machine.base_bytes, "hidden": 0 if on_device else self.hidden_bytes(block)})

    def parts(self, decision: Decision) -> dict[Tier, dict[str, int]]:
        """The named parts of the peak of each tier."""
        transients = self.transients(decision)
        parts: dict[Tier, dict[str, int]] = {"device": dict(transients.device), "host": dict(transients.host), "disk": {}}
        homes: Counter[Tier] = Counter()
        for tensor in self.model.tensors:
            if tensor.is_matrix:
                homes[decision.homes[tensor.name]] += decision.tensor_bytes(tensor)
        streamed, staged = self.largest_streams(decision)
        kv, buffers = self._kv(decision)
        for tier, named in parts.items():
            named["weights"] = homes[tier]
            named["kv"] = round(kv[tier])
        parts["device"]["weight buffers"] = decision.num_buffers * streamed
        parts["host"]["weight buffers"] = decision.num_buffers * staged
        parts["device"]["kv buffers"] = round(buffers["device"])
        parts["host"]["kv buffers"] = round(buffers["host"])
        return parts

    def peaks(self, decision: Decision) -> dict[Tier, int]:
        """Bytes of each tier at the peak."""
        return {tier: sum(parts.values()) for tier, parts in self.parts(decision).items()}

    def fits(self, decision: Decision) -> bool:
        """Whether every tier holds its peak."""
        return all(peak <= self.capacity[tier] for tier, peak in self.peaks(decision).items())

    def largest_streams(self, decision: Decision) -> tuple[int, int]:
        """Bytes of the largest layer (or head) that (goes up, comes from disk)."""
        sizes = []
        groups = [counting.layer_matrices(self.model, layer) for layer in range(self.model.num_layers)]
        for tensors in [*groups, (self.model.head,)]:
            away = sum(decision.tensor_bytes(t) for t in tensors if decision.homes[t.name] != "device")
            sizes.append((away, sum(decision.tensor_bytes(t) for t in tensors if decision.homes[t.name] == "disk")))
        return max(size for size, _ in sizes), max(size for _, size in sizes)

    def _widened(self, decision: Decision, rows: int) -> int:
        """The 16-bit copies of a layer's (or, made for each micro-batch, of a matrix's) weights and of a micro-batch's KV."""
        weights = self.widened(tuple(decision.formats.items()), decision.runtime.dequantizes_per == "block")
        kv = rows * self._largest_kv if decision.kv_format in QUANTIZED else 0.0
        return DEVICE_ACTIVATION_BYTES * round(weights + kv)

    def _widened_weights(self, formats: tuple[tuple[TensorClass, str], ...], whole: bool) -> int:
        """Elements of the largest layer's (or matrix's) quantized weights."""
        chosen = dict(formats)
        largest = 0
        for layer in range(self.model.num_layers):
            tensors = [t for t in counting.layer_matrices(self.model, layer) if chosen.get(t.tensor_class) in QUANTIZED]
            sizes = [counting.matrix_size(t)[0] * counting.matrix_size(t)[1] for t in tensors]
            largest = max(largest, sum(sizes) if whole else max(sizes, default=0))
        return largest

    def _kv(self, decision: Decision) -> tuple[dict[Tier, float], dict[Tier, float]]:
        """Homes of keys and values of the first block, and buffers of what is on its way, per tier."""
        rows, block = self.rows(decision)
        tokens = self.job.longest + self.job.gen_len
        homes: dict[Tier, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
        buffers: dict[Tier, float] = {"device": 0.0, "host": 0.0}
        for shape, units in zip(self.model.layers, decision.kv, strict=True):
            one = kv_bytes(shape, tokens, decision.kv_format)
            for number, unit in enumerate(units):
                homes[unit.home] += max(0, min(rows, block - number * rows)) * one
                if unit.home == "disk":
                    buffers["host"] = max(buffers["host"], BUFFERS * rows * one)
                if unit.home != "device" and unit.attends == "device":
                    buffers["device"] = max(buffers["device"], BUFFERS * rows * one)
        if any(unit.home != "device" for units in decision.kv for unit in units) and not buffers["device"]:
            largest = max(kv_bytes(shape, self.job.longest, decision.kv_format) for shape in self.model.layers)
            buffers["device"] = BUFFERS * rows * largest
        return homes, buffers
