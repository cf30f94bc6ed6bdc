"""Decision: every choice of a plan with a device, as the cost model takes it; and how a job is cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lmoffload_solver import counting
from lmoffload_solver.chain_schedule import num_buffers
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import TensorClass, Tier
from lmoffload_solver.workload import Workload


class KVUnit(NamedTuple):
    """The KV cache of one micro-batch at one layer: its home, and the processor that attends to it in decode."""

    home: Tier
    attends: Tier


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

    def format_of(self, tensor: TensorShape) -> str:
        """Format in which a tensor is kept."""
        return self.formats.get(tensor.tensor_class, tensor.format) if tensor.is_matrix else tensor.format

    def tensor_bytes(self, tensor: TensorShape) -> int:
        """Bytes of a tensor as kept."""
        return counting.tensor_bytes(tensor, self.format_of(tensor))

    @property
    def block_rows(self) -> int:
        return self.micro_batch * self.num_micro_batches

    @property
    def num_buffers(self) -> int:
        """Buffers of weights, as `chain_schedule.num_buffers`."""
        attended = any(unit.attends == "host" and unit.home != "device" for units in self.kv for unit in units)
        return num_buffers(self.prefetch_depth, attended and self.runtime.overlap == "queues")


@dataclass(frozen=True)
class ChainBlock:
    """`count` equal blocks of `num_batches` micro-batches of `rows` sequences (a mean, where the last block is cut short)."""

    num_batches: int
    rows: float
    count: int


@dataclass(frozen=True)
class Job:
    """A workload, its prompts taken at their mean length where time is counted and at their longest where memory is."""

    model: ModelShape
    workload: Workload

    @cached_property
    def num_prompts(self) -> int:
        return self.workload.num_prompts

    @cached_property
    def mean_length(self) -> float:
        return self.workload.prompt_tokens / self.workload.num_prompts

    @cached_property
    def longest(self) -> int:
        return self.workload.max_prompt_len

    @property
    def gen_len(self) -> int:
        return self.workload.gen_len

    @property
    def tokens(self) -> int:
        """Tokens that are generated."""
        return self.workload.num_prompts * self.workload.gen_len

    def blocks(self, micro_batch: int, num_micro_batches: int) -> Iterator[ChainBlock]:
        """The full blocks, and the rest, spread evenly over as few micro-batches as hold it."""
        full, rest = divmod(self.num_prompts, micro_batch * num_micro_batches)
        if full:
            yield ChainBlock(num_micro_batches, float(micro_batch), full)
        if rest:
            batches = -(-rest // micro_batch)
            yield ChainBlock(batches, rest / batches, 1)
