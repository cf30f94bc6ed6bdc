"""Bytes of the compute tier at the peak of each phase, as a formula with named parts.

    peak = base + objects + vectors + homes of weights + ring buffers + KV + max over phases (suspended + max(layer, head))

Homes (weights, KV, the live state of every suspended micro-batch) add up; transients take the maximum. KV has exactly the capacity that
each sequence of the first, largest block needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.blocks import CHUNK_MULTIPLE, lengths_of
from lmoffload_solver.counting import ACTIVATION_BYTES
from lmoffload_solver.kv_homes import KVHomes
from lmoffload_solver.machine import Disk, MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, TensorPlan, kept_model
from lmoffload_solver.schedule import STAGING_BUFFERS, Spilled, aligned_bytes, num_slots, slot_bytes, units_of
from lmoffload_solver.workload import Limits, Workload

TILE_BYTES = 4 * 2**20
"""fp32 bytes of the weights that one thread widens at a time (`lmoffload.kernels.tiles`)."""

TILE_ROWS_AT_ONCE = 128
"""Activation rows of one product over a tile."""

PACKING_BYTES = 2 * 2**20
"""What the product library packs operands into, per thread."""

QUERY_BLOCK = 256
"""Queries whose scores one thread holds in the prefill, three copies (scores, exponentials, products)."""

GREENLET_BYTES = 64 * 2**10
"""Saved stack and frames of a suspended micro-batch."""

LAYER_OBJECT_BYTES = 160 * 2**10
"""Modules and parameters without data of a decoder layer."""

TOKENIZER_BYTES_PER_TOKEN = 512
"""Vocabulary and merges of a tokenizer, per entry."""

RECORDED_SIZES = 2
"""Numbers of tokens whose recorded work is kept."""

SAMPLING_COPIES = 6
"""fp32-sized copies of one sequence's logits while it is sampled: scaled, sorted with 8-byte indices, probabilities, running sums."""

SCORING_COPIES = 64
"""The same while given tokens are scored, 32 at a time: log-probabilities and what they are computed from."""


@dataclass(frozen=True)
class Parts:
    """Bytes that do not depend on where the matrices lie, but for the logits."""

    always: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    """Per phase: "suspended" adds to the larger of "layer" and "head"."""

    @property
    def phase_bytes(self) -> int:
        """The largest phase."""
        return max(phase["suspended"] + max(phase["layer"], phase["head"]) for phase in self.phases.values())

    @property
    def total(self) -> int:
        """All parts at the peak."""
        return sum(self.always.values()) + self.phase_bytes


class JobMemory:
    """Memory of a job's blocks, for any size of micro-batch."""

    def __init__(
        self, model: ModelShape, workload: Workload, base_bytes: int, key_format: str = "fp32", value_format: str = "fp32"
    ) -> None:
        self.model, self.base_bytes = model, base_bytes
        lengths = np.array(lengths_of(workload), dtype=np.int64)
        self._tokens = np.concatenate(([0], np.cumsum(lengths)))
        self.kv = KVHomes(model, workload, key_format, value_format)
        self._longest = int(lengths[0])
        self._scored = workload.scored
        self.vectors_bytes = counting.vector_bytes(model) + pinned_bytes(model)
        self._head_bytes = ACTIVATION_BYTES * counting.matrix_size(model.head)[0]
        self._attention = max(
            2 * model.hidden_size + 5 * s.num_heads * s.key_dim + 3 * s.num_kv_heads * (s.key_dim + s.value_dim) for s in model.layers
        )
        self._kv_token_bytes = max(counting.kv_bytes_per_token(layer) for layer in model.layers)
        self._mlp = max(2 * model.hidden_size + _widest_mlp(model) + 2 * model.intermediate_size, _experts(model))
        attention = [2 * s.num_heads * s.key_dim + s.num_kv_heads * (s.key_dim + s.value_dim) for s in model.layers]
        self._mid_layer = model.hidden_size + max(*attention, _widest_mlp(model) + model.mlp_width)
        self.tile_bytes = PACKING_BYTES + max(_tile_bytes(*counting.matrix_size(t)) for t in model.tensors if t.is_matrix)

    def parts(
        self,
        micro_batch: int,
        num_micro_batches: int,
        threads: int,
        *,
        head_streams: bool,
        layers_cut: bool,
        prefill_chunk: int | None = None,
        kv_on_disk: int = 0,
    ) -> Parts:
        """Parts of a plan's peak. Where the head streams in pieces, every suspended micro-batch keeps its logits; where layers are cut at
        their matrices, it keeps what its layer has computed so far. Chunks of a prompt (`Plan.prefill_chunk`) are suspended each on its
        own, and one layer's keys and values of the row that a chunk goes on with are held twice: so far, and with the chunk's."""
        num_rows = self.kv.num_rows
        block_rows = min(micro_batch * num_micro_batches, num_rows)
        rows = min(micro_batch, num_rows)
        multiple = counting.token_multiple(self.model)
        tokens = int(self._tokens[block_rows])
        chunks = num_micro_batches if prefill_chunk is None else num_micro_batches + tokens // max(1, prefill_chunk - CHUNK_MULTIPLE + 1)
        padding = multiple * num_micro_batches
        always = {
            "base": self.base_bytes,
            "objects": self.model.num_layers * LAYER_OBJECT_BYTES
            + self.model.vocab_size * TOKENIZER_BYTES_PER_TOKEN
            + chunks * GREENLET_BYTES,
            "vectors": self.vectors_bytes,
            "kv": self.kv.host_bytes(micro_batch, block_rows, kv_on_disk),
            "tiles": threads * self.tile_bytes,
            "records": 0 if layers_cut else self.record_bytes(counting.padded(max(int(self._tokens[rows]), rows), multiple)),
        }
        first, carried = counting.padded(int(self._tokens[rows]), multiple), 0
        kept = (first, tokens + multiple * chunks) if self._scored else (rows, block_rows)
        if prefill_chunk is not None and prefill_chunk < first:
            first = counting.padded(max(prefill_chunk, CHUNK_MULTIPLE), multiple)
            carried = 2 * self._longest * self._kv_token_bytes
        scores = 3 * ACTIVATION_BYTES * threads * min(QUERY_BLOCK, self._longest) * self._longest
        return Parts(
            always,
            {
                "prefill": {
                    "suspended": self.suspended_bytes(tokens + multiple * chunks, layers_cut),
                    "layer": self.layer_bytes(first) + carried + scores,
                    "head": self.head_bytes(first, *kept, head_streams),
                },
                "decode": {
                    "suspended": self.suspended_bytes(block_rows + padding, layers_cut),
                    "layer": self.layer_bytes(counting.padded(rows, multiple)),
                    "head": self.head_bytes(counting.padded(rows, multiple), rows, block_rows, head_streams),
                },
            },
        )

    def suspended_bytes(self, tokens: int, layers_cut: bool) -> int:
        """State of suspended micro-batches of `tokens` tokens. In the middle of a layer a forward also holds a normed copy, and query
        (with the attention's output), key and value, or the MLP's products: hidden + max(2·query + key + value, widest + intermediate)."""
        return counting.suspended_bytes(self.model, tokens) + (ACTIVATION_BYTES * tokens * self._mid_layer if layers_cut else 0)

    def layer_bytes(self, tokens: int) -> int:
        """Temporaries of a decoder layer over `tokens` tokens, fp32, the larger of
        attention: normed copies 2·hidden; q with its rotated copies 5·query; k and v with theirs 3·(key + value);
        MLP: normed copies 2·hidden; gate (or gate and up in one), its activation, and up or their product: widest + 2·intermediate;
        experts: see `_experts`."""
        return ACTIVATION_BYTES * tokens * max(self._attention, self._mlp)

    def record_bytes(self, most_tokens: int) -> int:
        """What recorded work of layers keeps between steps (`lmoffload.modeling.recorder`), for the numbers of tokens used last among
        few: input, attention and MLP of a layer, as in `layer_bytes`, none of which takes the place of another."""
        tokens = min(most_tokens, counting.few_tokens(self.model))
        return RECORDED_SIZES * ACTIVATION_BYTES * tokens * (2 * self.model.hidden_size + self._attention + self._mlp)

    def head_bytes(self, tokens: int, rows: int, block_rows: int, head_streams: bool) -> int:
        """Final norm over all tokens (2·hidden); logits, two more copies of those of a micro-batch (a piece's as computed, the check for
        infinities), and one sequence's copies while it is sampled."""
        kept = block_rows if head_streams else rows
        logits = self._head_bytes * (kept + 2 * (rows + counting.LEAST_ROWS - 1) + (SCORING_COPIES if self._scored else SAMPLING_COPIES))
        return 2 * counting.hidden_bytes(self.model, tokens) + logits


def placeable(model: ModelShape) -> tuple[str, ...]:
    """Names of the tensors whose home is a choice: the matrices of the layers, the embedding table and the head."""
    outside = {model.embedding.name, model.head.name}
    return tuple(t.name for t in model.tensors if t.is_matrix and (t.layer is not None or t.name in outside))


def pinned_bytes(model: ModelShape) -> int:
    """Bytes of the matrices that are always resident (position tables, projections outside the layers)."""
    names = set(placeable(model))
    return sum(aligned_bytes(counting.tensor_bytes(t), t.num_runs) for t in model.tensors if t.is_matrix and t.name not in names)


def resident_bytes(model: ModelShape, tensors: Mapping[str, TensorPlan], tier: str = "host") -> int:
    """Memory of the matrices at home in a tier whose home is a choice; each takes its aligned superset."""
    homes = (model.by_name[name] for name in placeable(model) if tensors[name].tier == tier)
    return sum(aligned_bytes(counting.tensor_bytes(tensor), tensor.num_runs) for tensor in homes)


def spilled_of(model: ModelShape, plan: Plan, block_lengths: Sequence[int] | None = None) -> dict[tuple[int, int], Spilled]:
    """Keys and values of a block (the first, largest one unless given by its rows' tokens) that the plan keeps on the disk, by layer and
    micro-batch."""
    lengths = [length + plan.workload.gen_len for length in lengths_of(plan.workload)] if block_lengths is None else block_lengths
    found = {}
    for layer, batch, tier in plan.kv.homes:
        rows = lengths[batch * plan.micro_batch : (batch + 1) * plan.micro_batch] if batch < plan.num_micro_batches else ()
        if tier == "disk" and rows:
            found[layer, batch] = counting.spilled(model.layers[layer], rows, plan.kv.format.key, plan.kv.format.value)
    return found


def kv_on_host(model: ModelShape, plan: Plan) -> int:
    """Bytes of the first block's keys and values on the host, and of the staging buffers through which those on the disk pass."""
    lengths = [length + plan.workload.gen_len for length in lengths_of(plan.workload)]
    on_disk = spilled_of(model, plan)
    rows = lengths[: plan.micro_batch * plan.num_micro_batches]
    total = sum(counting.kv_bytes(model, tokens, plan.kv.format.key, plan.kv.format.value) for tokens in rows)
    for layer, batch in on_disk:
        of_batch = rows[batch * plan.micro_batch : (batch + 1) * plan.micro_batch]
        kept = (counting.layer_kv_bytes(model.layers[layer], tokens, plan.kv.format.key, plan.kv.format.value) for tokens in of_batch)
        total -= sum(kept)
    return total + staging_bytes(on_disk)


def staging_bytes(on_disk: Mapping[tuple[int, int], Spilled]) -> int:
    """Bytes of the staging buffers."""
    return STAGING_BUFFERS * max((spilled.num_bytes for spilled in on_disk.values()), default=0)


def breakdown(model: ModelShape, plan: Plan, base_bytes: int | None = None) -> dict[str, int]:
    """The named parts of a plan's peak in the compute tier; they add up to `peak_bytes`."""
    model = kept_model(model, plan)
    units = units_of(model, plan)
    slots = num_slots(units, plan.prefetch_depth)
    base = plan.predicted.base_bytes if base_bytes is None else base_bytes
    job = JobMemory(model, plan.workload, base, plan.kv.format.key, plan.kv.format.value)
    head_streams = plan.weights.tensors[model.head.name].tier == "disk"
    parts = job.parts(
        plan.micro_batch,
        plan.num_micro_batches,
        plan.threads["compute"],
        head_streams=head_streams,
        layers_cut=plan.stream == "matrix",
        prefill_chunk=plan.prefill_chunk,
    )
    largest = max(parts.phases.values(), key=lambda phase: phase["suspended"] + max(phase["layer"], phase["head"]))
    return {
        **parts.always,
        "kv": kv_on_host(model, plan),
        "weights": resident_bytes(model, plan.weights.tensors),
        "ring": slots * slot_bytes(units) if slots else 0,
        "suspended": largest["suspended"],
        "transient": max(largest["layer"], largest["head"]),
    }


def peak(model: ModelShape, plan: Plan, base_bytes: int | None = None) -> int:
    """Bytes of the compute tier at a plan's peak, `base_bytes` (the plan's own unless given) included."""
    return sum(breakdown(model, plan, base_bytes).values())


@dataclass(frozen=True)
class Capacity:
    """What may be used."""

    memory_bytes: int
    """Of the compute tier: the least of the machine's usable memory and the user's limit."""
    weights_bytes: int | None
    """Homes and buffers of weights."""
    disk_bytes: int
    """For keys and values: what is free, or the user's limit."""

    @staticmethod
    def of(model: ModelShape, machine: MachineProfile, limits: Limits, disk: Disk | None = None) -> Capacity:
        """Capacity under a machine's and a user's limits."""
        usable = machine.host.memory_usable_bytes
        memory = usable if limits.host_memory_bytes is None else min(usable, limits.host_memory_bytes)
        weights = [] if limits.weights_memory_bytes is None else [limits.weights_memory_bytes]
        if limits.weights_memory_share is not None:
            weights.append(int(limits.weights_memory_share * counting.weights_bytes(model)))
        free = (disk or machine.disks[0]).free_bytes
        return Capacity(memory, min(weights, default=None), free if limits.disk_space_bytes is None else limits.disk_space_bytes)


def _tile_bytes(n: int, k: int) -> int:
    """One thread's tile of a matrix [N, K] and the product over it."""
    rows = min(n, max(16, TILE_BYTES // (ACTIVATION_BYTES * k)))
    return ACTIVATION_BYTES * rows * (k + TILE_ROWS_AT_ONCE)


def _experts(model: ModelShape) -> int:
    """Elements that a layer of experts holds for a token at most, all tokens choosing the same expert: normed copies 2·hidden, the
    activations of all its experts, a sorted index for each (3 numbers of 8 bytes), and the larger of the token gathered with one expert's
    gate and up, activation and product (hidden + 4·size), and the sum of outputs, one of them and its weighted copy (3·hidden)."""
    kept = 2 * model.hidden_size + model.experts_per_token * (model.expert_size + 6)
    return kept + max(model.hidden_size + 4 * model.expert_size, 3 * model.hidden_size) if model.experts_per_token else 0


def _widest_mlp(model: ModelShape) -> int:
    widths = [counting.matrix_size(t)[0] for t in model.tensors if t.is_matrix and t.tensor_class == "mlp"]
    return max(widths, default=model.intermediate_size)
