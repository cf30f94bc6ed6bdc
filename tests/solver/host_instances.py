"""Random jobs of machines without a device, and the best plan found by trying every one."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

from lmoffload_solver import counting
from lmoffload_solver.assemble import Found
from lmoffload_solver.candidate import MOST_PREFETCH_WITH_LOADS, Candidate, Cut, Domain
from lmoffload_solver.costs import PHASES, Phase, disk_of, num_requests
from lmoffload_solver.evaluate import Evaluator
from lmoffload_solver.formats import QUANTIZED
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape, TensorShape
from lmoffload_solver.prices import Prices
from lmoffload_solver.program import Program
from lmoffload_solver.rounding import Level, Part, Stream
from lmoffload_solver.schedule import aligned_bytes
from lmoffload_solver.search import Search
from lmoffload_solver.value import Quality
from lmoffload_solver.variants import Offered, Variant, offered
from lmoffload_solver.workload import Limits, Workload
from tests.solver.toys import MIB, make_machine, make_model, make_work

FEWER: dict[int, tuple[str, ...]] = {7: ("q", "k", "v", "o", "gate", "up", "down"), 4: ("q", "o", "up", "down"), 3: ("q", "o", "up")}
"""Matrices kept of each layer."""


LARGE = ([2048, 3072, 4096], [8192, 11008], [32000, 128000])
"""Hidden sizes, widths of the MLP, vocabularies."""


@dataclass(frozen=True)
class HostInstance:
    """A job on a machine."""

    model: ModelShape
    machine: MachineProfile
    workload: Workload
    limits: Limits

    @property
    def prices(self) -> Prices:
        return Prices(self.model, self.machine, disk_of(self.machine, None), self.workload, self.limits)

    @property
    def domain(self) -> Domain:
        return Domain.of(self.model, self.machine, self.workload, self.limits)

    @property
    def offered(self) -> Offered:
        return offered(self.model, self.machine, self.domain.threads, self.workload.quality, None)

    def search(self) -> Search:
        return Search(self.prices, self.domain, self.offered, float("inf"))

    def solved(self) -> Found | None:
        return self.search().run()


def random_instance(seed: int) -> HostInstance:
    """A small one: of one to three layers with all their sets of matrices few."""
    chance = random.Random(seed)
    num_layers, matrices = chance.choice([(1, 7), (1, 4), (1, 4), (2, 4), (2, 3), (2, 3), (3, 3)])
    quality: Quality = chance.choice(["exact", "exact", "int8", "int4"]) if num_layers * matrices < 7 else "exact"
    return _instance(chance, num_layers, matrices, quality, fixed=True)


def deeper_instance(seed: int) -> HostInstance:
    """A small one of two to four layers of three matrices."""
    chance = random.Random(seed)
    return _instance(chance, chance.randint(2, 4), 3, chance.choice(["exact", "exact", "int8"]), fixed=True)


def larger_instance(seed: int) -> HostInstance:
    """One of as many layers and as large matrices as models have, with blocks free."""
    chance = random.Random(seed)
    return _instance(chance, chance.randint(16, 40), 7, chance.choice(["exact", "exact", "int8", "int4"]), fixed=False)


def _instance(chance: random.Random, num_layers: int, matrices: int, quality: Quality, *, fixed: bool) -> HostInstance:
    tied = chance.random() < 0.5
    hidden, intermediate, vocab = (chance.choice(c) for c in (([64, 128], [96, 256], [100, 3000]) if fixed else LARGE))
    heads = hidden // (16 if fixed else 64)
    whole = make_model(num_layers, hidden, intermediate, heads, heads // 2, vocab, stored="bf16", tied=tied)
    model = whole.model_copy(update={"tensors": tuple(t for t in whole.tensors if _kept(t, matrices))})
    machine = make_machine(
        chance.choice([6, 10, 20]) * MIB if fixed else chance.choice([1, 2, 8]) * 1024 * MIB,
        disk_bytes_per_s=chance.choice([1e7, 1e8, 1e9] if fixed else [2e8, 1e9, 4e9]),
        flops_per_s=chance.choice([1e9, 1e10] if fixed else [1e10, 1e11, 1e12]),
        base_bytes=2 * MIB,
        slowdowns=chance.choice([None, (1.05, 1.2), (2.5, 1.5)]),
        formats=("fp32", "bf16", "int8", "int4-g32"),
        speeds={"int8": chance.choice([0.5, 1.0, 3.0]), "int4-g32": chance.choice([0.5, 3.0])},
        kv_formats=("fp32", "bf16"),
    )
    work = make_work(chance.randint(1, 6 if fixed else 64), chance.randint(1, 40 if fixed else 400), chance.randint(1, 6 if fixed else 32))
    sizes = {"micro_batch": chance.choice([1, 2, 4]), "num_micro_batches": chance.choice([1, 2]), "threads": 1} if fixed else {}
    limits = Limits(weights_memory_share=chance.choice([0.2, 0.3, 0.5, 0.7, 0.9]), **sizes)  # type: ignore[arg-type]
    return HostInstance(model, machine, work.model_copy(update={"quality": quality}), limits)


def _kept(tensor: TensorShape, matrices: int) -> bool:
    return tensor.layer is None or not tensor.is_matrix or tensor.name.split(".")[1] in FEWER[matrices]


def every_candidate(prices: Prices, domain: Domain, choices: Offered) -> Iterator[tuple[Evaluator, Candidate]]:
    """The whole domain by plain loops; a kernel that is nowhere quicker than another, and somewhere slower, is no choice."""
    stored = {curve.kernel for curve in prices.machine.linear if curve.format == prices.model.head.format}
    packed = {curve.kernel for curve in prices.machine.linear if curve.format in QUANTIZED}
    for chosen, kv_format in product(product(*choices.weights.values()), choices.kv):
        lossy = tuple((name, fmt) for name, fmt in zip(choices.weights, chosen, strict=True) if fmt is not None)
        evaluator = Evaluator(prices, Variant(lossy, kv_format))
        names = {f"{q}+{s}" for q in packed for s in stored} if lossy else stored
        for threads, (size, count), chunk in product(domain.threads, domain.micro_batches, domain.prefill_chunks):
            cut = Cut(threads, size, count, chunk)
            kernels = [worth_trying(evaluator, cut, phase, names) for phase in PHASES]
            for prefill, decode, stream, depth, on_disk in product(*kernels, domain.streams, domain.depths, domain.kv_on_disk):
                if not on_disk or (stream == "layer" and depth <= MOST_PREFETCH_WITH_LOADS):
                    yield evaluator, Candidate(size, count, threads, prefill, decode, depth, stream, evaluator.variant, chunk, on_disk)


def worth_trying(evaluator: Evaluator, cut: Cut, phase: Phase, kernels: Collection[str]) -> list[str]:
    """The kernels but those of which another takes no longer for any matrix, and less for some."""
    job = evaluator.job(cut.threads)
    taken: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for block in evaluator.prices.blocks(cut.block_rows):
        sizes = job.sizes(block, cut.micro_batch, phase, cut.prefill_chunk if phase == "prefill" else None)
        for kernel, seconds in taken.items():
            seconds += [one for of_layer in job.linear_seconds(sizes, kernel) for one in of_layer]
            seconds.append(job.head_seconds(sizes, kernel))

    def beaten(seconds: list[float]) -> bool:
        return any(all(o <= s for o, s in zip(other, seconds, strict=True)) and other != seconds for other in taken.values())

    return sorted(kernel for kernel, seconds in taken.items() if not beaten(seconds))


def brute_force(instance: HostInstance) -> tuple[float | None, int]:
    """Seconds of the best plan of all (None: nothing fits), and how many were tried: every candidate of the domain with every set of whole
    matrices, none taken for another."""
    best: float | None = None
    tried = 0
    levels: dict[tuple[Variant, Stream], list[tuple[Level, ...]]] = {}
    for evaluator, candidate in every_candidate(instance.prices, instance.domain, instance.offered):
        key = evaluator.variant, candidate.stream
        if key not in levels:
            levels[key] = [every_level(evaluator.model, layer, candidate.stream) for layer in range(evaluator.model.num_layers)]
        rounding = evaluator.roundings[candidate.stream]
        for head_at_home, embedding_at_home in product((True, False), repeat=2):
            room = evaluator.room(candidate, head_at_home)
            if (evaluator.model.tied_head and head_at_home != embedding_at_home) or not evaluator.kv_fits_disk(candidate):
                continue
            for layers in product(*levels[key]):
                placement = rounding.placed(layers, candidate.prefetch_depth, head_at_home, embedding_at_home)
                if placement.memory_bytes <= room:
                    tried += 1
                    seconds = evaluator.simulate(candidate, placement).total_s
                    best = seconds if best is None else min(best, seconds)
    return best, tried


def every_level(model: ModelShape, layer: int, stream: Stream) -> tuple[Level, ...]:
    """Every set of a layer's matrices."""
    matrices = counting.layer_matrices(model, layer)
    stored = [counting.tensor_bytes(tensor) for tensor in matrices]
    found = []
    for flags in product((False, True), repeat=len(matrices)):
        chosen = [place for place, flag in enumerate(flags) if flag]
        aligned = [aligned_bytes(stored[place]) for place in chosen]
        cuts = chosen[1:] if stream == "matrix" else []
        parts = []
        for first, end in pairwise([0, *cuts, len(matrices)]):
            sizes = [stored[place] for place in range(first, end) if flags[place]]
            parts.append(Part(sum(sizes), num_requests(sizes), tuple(range(first, end))))
        slot = max(aligned, default=0) if stream == "matrix" else sum(aligned)
        found.append(Level(sum(aligned), sum(stored[place] for place in chosen), frozenset(chosen), tuple(parts), slot))
    return tuple(found)


def off_by(instance: HostInstance) -> float | None:
    """How far the dual of memory is from what a little more gives, relative, discrete choices fixed; None where memory does not bind."""
    found = instance.solved()
    if found is None:
        return None
    choices = Evaluator(instance.prices, found.candidate.variant).program_choices(found.candidate)
    solution = Program(choices).solve()
    assert solution is not None
    binding = choices.memory_bytes if choices.weights_bytes is None else min(choices.memory_bytes, choices.weights_bytes)
    if solution.seconds_per_byte < 1e-12:
        return None
    little = binding // 10_000
    weights = None if choices.weights_bytes is None else choices.weights_bytes + little
    more = Program(replace(choices, memory_bytes=choices.memory_bytes + little, weights_bytes=weights)).solve()
    assert more is not None
    return abs((solution.total_s - more.total_s) / (little * solution.seconds_per_byte) - 1)


CHANGES = ("memory", "disk", "cores", "weights")


def more_of(instance: HostInstance, change: str) -> HostInstance:
    """The same with more of something."""
    machine = instance.machine
    if change == "memory":
        host = machine.host.model_copy(update={"memory_usable_bytes": machine.host.memory_usable_bytes + MIB // 2})
        return replace(instance, machine=machine.model_copy(update={"host": host}))
    if change == "disk":
        (disk,) = machine.disks
        read = tuple(
            c.model_copy(update={"bytes_per_s": c.bytes_per_s.model_copy(update={"y": tuple(1.3 * y for y in c.bytes_per_s.y)})})
            for c in disk.read
        )
        return replace(instance, machine=machine.model_copy(update={"disks": (disk.model_copy(update={"read": read}),)}))
    if change == "cores":
        return replace(instance, limits=instance.limits.model_copy(update={"threads": 2}))
    share = instance.limits.weights_memory_share
    return replace(instance, limits=instance.limits.model_copy(update={"weights_memory_share": min(1.0, (share or 1.0) + 0.1)}))
