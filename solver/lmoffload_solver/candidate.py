"""Candidate: the discrete choices of a plan; and the domain they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.rounding import Stream
from lmoffload_solver.threads import compute_choices
from lmoffload_solver.variants import EXACT, Variant
from lmoffload_solver.workload import Limits, Workload

MOST_PREFETCH = 4
MOST_MICRO_BATCHES = 64
MOST_PREFETCH_WITH_LOADS = 1
"""The same where keys and values are loaded from the disk: weights further ahead would only stand before them in its queue."""
KV_SHARES = 2
"""Keys and values of so many equal shares of the layers may be on the disk."""
PREFILL_CHUNKS = (2048, 512, 128)
"""Tokens of a micro-batch's prompts that may be computed at once."""


@dataclass(frozen=True)
class Candidate:
    """The discrete choices."""

    micro_batch: int
    num_micro_batches: int
    threads: int
    prefill_kernel: str
    decode_kernel: str
    prefetch_depth: int
    stream: Stream = "layer"
    variant: Variant = EXACT
    prefill_chunk: int | None = None
    kv_on_disk: int = 0
    """Layers whose keys and values are at home on the disk, those of all micro-batches (`kv_homes.layers_on_disk`)."""

    @property
    def block_rows(self) -> int:
        return self.micro_batch * self.num_micro_batches

    @property
    def kernels(self) -> tuple[str, ...]:
        """Every kernel named."""
        return (*self.prefill_kernel.split("+"), *self.decode_kernel.split("+"))

    def streaming(self, stream: Stream, prefetch_depth: int, kv_on_disk: int) -> Candidate:
        """The same with another way to stream."""
        return replace(self, stream=stream, prefetch_depth=prefetch_depth, kv_on_disk=kv_on_disk)


@dataclass(frozen=True)
class Cut:
    """How a job is cut, and the threads that compute it."""

    threads: int
    micro_batch: int
    num_micro_batches: int
    prefill_chunk: int | None = None

    @property
    def block_rows(self) -> int:
        return self.micro_batch * self.num_micro_batches


@dataclass(frozen=True)
class Domain:
    """What the search chooses from.

    Micro-batch: 2^i, 3·2^i, and the job cut into 1 to 4 equal parts. Number of micro-batches: 2^i, 3·2^i up to 64, and the job cut into 1
    to 4 equal blocks. Prefetch depth 0 to 4. Layers streamed whole or matrix by matrix. Every measured number of compute threads. Per
    phase every measured kernel: one for the model's main stored format, one for what is quantized. Prompts whole, or in chunks of 2048, 512
    or 128 tokens where the longest is longer, with which more memory is left for weights that would not all stay at home; for the same
    reason keys and values of half or all of the layers on the disk (of which the profile knows what small writes take), where layers stream
    whole and at most one ahead. Limits fix a choice.
    A block larger than the job is the job. Which formats there are to choose from, `variants.Offered` says.
    """

    micro_batches: tuple[tuple[int, int], ...]
    """(micro-batch, number of micro-batches)."""
    threads: tuple[int, ...]
    depths: tuple[int, ...]
    streams: tuple[Stream, ...] = ("layer", "matrix")
    prefill_chunks: tuple[int | None, ...] = (None,)
    kv_on_disk: tuple[int, ...] = (0,)
    """Ascending, 0 first."""

    @staticmethod
    def of(model: ModelShape, machine: MachineProfile, workload: Workload, limits: Limits) -> Domain:
        """The domain of a job.

        Raises:
            StatedError: the profile has no curve for a stored format of the model.
        """
        cores = machine.host.cores if limits.threads is None else min(limits.threads, machine.host.cores)
        formats = frozenset(t.format for t in model.tensors if t.is_matrix)
        num = workload.num_prompts
        sizes = _sizes(num, num) if limits.micro_batch is None else (min(limits.micro_batch, num),)
        pairs: list[tuple[int, int]] = []
        for size in sizes:
            most = -(-num // size)
            fixed = limits.num_micro_batches
            counts = _sizes(most, MOST_MICRO_BATCHES) if fixed is None else (min(fixed, most),)
            pairs.extend((size, count) for count in counts)
        cut = () if model.rotary_follows_length else (size for size in PREFILL_CHUNKS if size < workload.max_prompt_len)
        written = any(disk.random_write_s is not None for disk in machine.disks)
        counts = tuple(sorted({share * model.num_layers // KV_SHARES for share in range(KV_SHARES + 1)})) if written else (0,)
        threads, depths = compute_choices(machine, formats, cores), tuple(range(MOST_PREFETCH + 1))
        return Domain(tuple(pairs), threads, depths, prefill_chunks=(None, *cut), kv_on_disk=counts)


def _sizes(total: int, most: int) -> tuple[int, ...]:
    """2^i and 3·2^i up to `total` and `most`, and `total` cut into 1 to 4 equal parts, ascending."""
    grid = {factor << i for factor in (1, 3) for i in range(total.bit_length())}
    grid |= {-(-total // parts) for parts in range(1, 5)}
    return tuple(sorted(size for size in grid if size <= min(total, most)))
