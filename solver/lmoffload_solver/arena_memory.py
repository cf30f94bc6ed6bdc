"""Memory of a plan for an emulated device: an arena for the device's tier, the rest of the process for the host's.

Everything is as on a machine without a device (`memory`): activations, hidden states, keys and values in fp32 unless quantized, weights as
whole pages that hold them, the live state of every suspended micro-batch. What computing takes for a while counts against the arena.
"""

from __future__ import annotations

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.chain_tasks import head_pieces
from lmoffload_solver.counting import ACTIVATION_BYTES
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.device_memory import BUFFERS, ChainMemory, KVBuffers, Transients
from lmoffload_solver.lengths import Amount
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.memory import GREENLET_BYTES, LAYER_OBJECT_BYTES, QUERY_BLOCK, TOKENIZER_BYTES_PER_TOKEN, JobMemory
from lmoffload_solver.model import LayerShape, TensorShape
from lmoffload_solver.schedule import aligned_bytes
from lmoffload_solver.value import Tier
from lmoffload_solver.workload import Limits


class ArenaMemory(ChainMemory):
    """Memory of a job on a machine whose device is emulated."""

    head_in_pieces = True
    base_kv = "fp32"

    def __init__(self, job: Job, machine: MachineProfile, limits: Limits) -> None:
        super().__init__(job, machine, limits)
        self._on_host = JobMemory(job.model, job.workload, machine.base_bytes)
        self._threads = machine.host.cores if limits.threads is None else min(limits.threads, machine.host.cores)
        self._multiple = counting.token_multiple(job.model)
        self.vectors = counting.vector_bytes(job.model)

    def room_bytes(self, tensor: TensorShape, num_bytes: int) -> int:
        return aligned_bytes(num_bytes, tensor.num_runs)

    def _kv_bytes(self, shape: LayerShape, kv_format: str, new_tokens: int) -> float:
        return float(counting.layer_kv_bytes(shape, self.job.longest + new_tokens, kv_format, kv_format))

    def _kv_buffers(self, rows: int, kv_format: str) -> KVBuffers:
        """Whole units, in whole pages of keys and of values: what is on its way is laid out as it is at home."""
        most = max(self._kv_bytes(shape, kv_format, self.job.gen_len) for shape in self.model.layers)
        whole = BUFFERS * (rows * most + 2 * counting.whole_pages(1))
        return KVBuffers(whole, whole)

    def work_bytes(self, rows: Amount, *, eager: bool) -> Amount:
        """Temporaries of a layer over a micro-batch's prompts with the scores of every thread, or its logits."""
        return working_bytes(self._on_host, rows * self.job.longest + self._multiple, rows, self.job.longest, self._threads)

    def hidden_bytes(self, rows: Amount) -> Amount:
        """Hidden states, positions and rotary embedding of prompts."""
        return self._on_host.suspended_bytes(rows * self.job.longest + self._multiple, False)

    def _head_streams(self, decision: Decision) -> tuple[int, int]:
        """Of its largest piece."""
        head, home = self.model.head, decision.homes[self.model.head.name]
        if home == "device":
            return 0, 0
        pieces = head_pieces(self.model, decision)
        rows = max(end - first for first, end in pieces)
        piece = self.room_bytes(head, decision.tensor_bytes(head) * rows // pieces[-1][1])
        return piece, piece if home == "disk" else 0

    def transients(self, rows: Amount, block: Amount, hidden: Tier, kv_format: str, widened: Amount, *, eager: bool = False) -> Transients:
        on_device = hidden == "device"
        num_batches = np.ceil(block / rows)
        carried = max(2 * s.num_heads * s.key_dim + s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.model.layers)
        device = {
            "vectors": self.vectors,
            "hidden": self.hidden_bytes(block) if on_device else 2 * BUFFERS * self.hidden_bytes(rows),
            "work": self.work_bytes(rows, eager=eager),
        }
        host = {
            "base": self.machine.base_bytes,
            "objects": self.num_devices * (self.model.num_layers * LAYER_OBJECT_BYTES + num_batches * GREENLET_BYTES)
            + self.model.vocab_size * TOKENIZER_BYTES_PER_TOKEN,
            "tiles": self.num_devices * self._threads * self._on_host.tile_bytes,
            "attention": ACTIVATION_BYTES * block * carried,
            "logits": ACTIVATION_BYTES * block * self.model.vocab_size,
            "hidden": self.parked_bytes(block, hidden),
        }
        return Transients(device, host)


def working_bytes(memory: JobMemory, tokens: Amount, rows: Amount, longest: int, threads: int) -> Amount:
    """Temporaries of a layer over so many tokens, padding included, with the scores of every thread, or the logits of so many rows."""
    scores = 3 * ACTIVATION_BYTES * threads * min(QUERY_BLOCK, longest) * longest
    return np.maximum(memory.layer_bytes(tokens) + scores, memory.head_bytes(tokens, rows, rows, False))
