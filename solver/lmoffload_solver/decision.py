"""Decision: every choice of a plan with a device, as the cost model takes it; and how a job is cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from lmoffload_solver import counting
from lmoffload_solver.blocks import Step, decode_steps
from lmoffload_solver.chain_schedule import num_buffers
from lmoffload_solver.costs import LayerKind
from lmoffload_solver.lengths import Amount, Lengths
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.pipeline import ALONE, Pipeline
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import TaskClass, TensorClass, Tier
from lmoffload_solver.workload import Workload

Products: TypeAlias = str
"""How products take weights. On a device given by a roofline quantized ones: "widen", from a widened copy of the layer, or "dequantizing",
in their inner loop. On one that runs the host's kernels: the kernel of a phase, as in `plan.KernelsPlan`."""

MOST_RUNS = 6
"""Runs of equal blocks that stand for all blocks of a job whose prompts differ."""


class KVUnit(NamedTuple):
    """The KV cache of one micro-batch at one layer: its home, and the processor that attends to it in decode."""

    home: Tier
    attends: Tier

    @property
    def host_attends(self) -> bool:
        """Whether the host does; what lies on the device is attended to there."""
        return self.attends == "host" and self.home != "device"


@dataclass(frozen=True)
class Decision:
    """Everything that is chosen."""

    micro_batch: int
    num_micro_batches: int
    formats: Mapping[TensorClass, str]
    """Classes whose matrices are kept in another format than the stored one."""
    homes: Mapping[str, Tier]
    """Of every matrix; vectors lie where the compute tier is."""
    kv_format: str
    kv: tuple[tuple[KVUnit, ...], ...]
    """Per layer, per micro-batch."""
    hidden: Tier
    prefetch_depth: int
    runtime: Runtime
    prefill_products: Products = "widen"
    decode_products: Products = "widen"
    threads: Mapping[TaskClass, int] = field(default_factory=dict)
    """Of each class of tasks on the host; empty: what the runtime's libraries take, at the profile's rates."""
    most_threads: int | None = None
    """What the user grants of the host's cores, which the threads share."""
    pipeline: Pipeline = ALONE
    """Layers by accelerator, and waves."""

    def products(self, step: int) -> Products:
        """How the products of a step take quantized weights."""
        return self.decode_products if step else self.prefill_products

    def format_of(self, tensor: TensorShape) -> str:
        """Format in which a tensor is kept."""
        return self.formats.get(tensor.tensor_class, tensor.format) if tensor.is_matrix else tensor.format

    def tensor_bytes(self, tensor: TensorShape) -> int:
        """Bytes of a tensor as kept."""
        return counting.tensor_bytes(tensor, self.format_of(tensor))

    @property
    def block_rows(self) -> int:
        return self.micro_batch * self.num_micro_batches

    @cached_property
    def host_attends(self) -> bool:
        """Whether the host attends to any keys and values."""
        return any(unit.host_attends for units in set(self.kv) for unit in units)

    @property
    def num_buffers(self) -> int:
        """Buffers of weights, as `chain_schedule.num_buffers`."""
        return num_buffers(self.prefetch_depth, self.host_attends and self.runtime.overlap == "queues")


class StepSize(NamedTuple):
    """One step of one micro-batch, or of many at once. Step 0 is the prefill."""

    step: int
    rows: Amount
    """Sequences."""
    tokens: Amount
    """Computed: whole prompts in the prefill, one of each sequence in a decode step."""
    first: Amount
    end: Amount
    """The run of sequences that the micro-batch stands for."""


@dataclass(frozen=True)
class ChainBlock:
    """`count` blocks of `num_batches` micro-batches of `rows` sequences, which are the sequences [first, end) of the job, longest first."""

    num_batches: Amount
    rows: Amount
    """A mean, where the last block is cut short."""
    count: Amount
    first: Amount
    end: Amount


@dataclass(frozen=True)
class Job:
    """A workload. Time is counted with the lengths of a block's own prompts, memory with the longest."""

    model: ModelShape
    workload: Workload

    @cached_property
    def num_prompts(self) -> int:
        return self.workload.num_prompts

    @cached_property
    def lengths(self) -> Lengths:
        return Lengths(self.workload)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For every layer the first layer that costs the same."""
        first: dict[LayerKind, int] = {}
        return tuple(first.setdefault(LayerKind.of(self.model, layer), layer) for layer in range(self.model.num_layers))

    @cached_property
    def longest(self) -> int:
        return self.workload.max_prompt_len

    @cached_property
    def mean_length(self) -> float:
        return self.workload.prompt_tokens / self.workload.num_prompts

    @property
    def gen_len(self) -> int:
        return self.workload.gen_len

    @property
    def tokens(self) -> int:
        """Tokens that are generated."""
        return self.workload.num_prompts * self.workload.gen_len

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The prefill and the decode steps that are sampled: keys and values grow from one to the next."""
        return (Step(0, 1.0), *decode_steps(self.workload.gen_len))

    def blocks(self, micro_batch: int, num_micro_batches: int) -> Iterator[ChainBlock]:
        """The full blocks, longest prompts first, and the rest, spread evenly over as few micro-batches as hold it. Where prompts differ
        blocks next to each other are taken together until there are no more than `MOST_RUNS`."""
        rows = micro_batch * num_micro_batches
        full, rest = divmod(self.num_prompts, rows)
        runs = min(full, 1 if self.lengths.are_equal else MOST_RUNS)
        bounds = np.linspace(0, full, runs + 1).round().astype(int).tolist() if runs else [0]
        for begin, end in pairwise(bounds):
            yield ChainBlock(num_micro_batches, float(micro_batch), end - begin, begin * rows, end * rows)
        if rest:
            batches = -(-rest // micro_batch)
            yield ChainBlock(batches, rest / batches, 1, full * rows, self.num_prompts)

    def size(self, block: ChainBlock, step: int) -> StepSize:
        """A step of a block's micro-batches."""
        tokens = block.rows * (self.lengths.tokens(block.first, block.end) if step == 0 else 1.0)
        return StepSize(step, block.rows, tokens, block.first, block.end)
