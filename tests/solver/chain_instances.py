"""Small jobs on machines with a device, made at random, and every plan of their domain, tried one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from lmoffload_solver.chain_domain import ChainDomain
from lmoffload_solver.chain_layout import lay_out
from lmoffload_solver.chain_predict import costs_of
from lmoffload_solver.chain_prices import BatchPrices
from lmoffload_solver.chain_schedule import Clock
from lmoffload_solver.chain_search import ChainFound, ChainSearch
from lmoffload_solver.chain_slowing import busy_of
from lmoffload_solver.chain_terms import PLACES
from lmoffload_solver.chain_variants import PRODUCTS
from lmoffload_solver.chain_work import ChainWork
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.device_costs import DeviceCosts
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.runtime import own_runtime
from lmoffload_solver.value import Quality, Tier
from lmoffload_solver.what_if import Change, changed
from lmoffload_solver.workload import Limits, PromptGroup, Workload
from tests.solver.device_toys import make_device_machine
from tests.solver.toys import MIB, make_model, make_work

TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def tiny_model(layers: int = 1, hidden: int = 256) -> ModelShape:
    """One matrix of attention and one of the MLP a layer, a tied table."""
    tensors = [TensorShape(name="embed", shape=(128, hidden), format="fp16", tensor_class="embedding", is_matrix=True)]
    for i in range(layers):
        tensors.append(
            TensorShape(name=f"{i}.qkvo", shape=(4 * hidden, hidden), format="fp16", tensor_class="attention", layer=i, is_matrix=True)
        )
        tensors.append(TensorShape(name=f"{i}.mlp", shape=(8 * hidden, hidden), format="fp16", tensor_class="mlp", layer=i, is_matrix=True))
    shape = LayerShape(num_heads=4, num_kv_heads=4, key_dim=hidden // 4, value_dim=hidden // 4)
    return ModelShape(
        name=f"tiny{layers}",
        model_type="opt",
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        vocab_size=128,
        layers=(shape,) * layers,
        tensors=tuple(tensors),
        tied_head=True,
    )


@dataclass(frozen=True)
class Instance:
    """A job, a machine, what is granted."""

    job: Job
    machine: MachineProfile
    limits: Limits
    quality: Quality

    def search(self, effort: float = inf) -> ChainSearch:
        return ChainSearch(self.job, self.machine, self.machine.disks[0], self.limits, self.quality, inf, effort=effort)

    def solved(self) -> ChainFound | None:
        return self.search().run()


def random_instance(seed: int) -> Instance:
    """From all on the device to most of it on disk; prompts of one length or of two; few cores or many. Every tenth may keep weights and
    KV in other formats; it has one prompt, so that its plans stay few enough to try all."""
    chance = random.Random(seed)
    lossy = seed % 10 == 4
    layers = 1 if lossy else chance.choice([1, 1, 1, 1, 1, 2])
    lengths = chance.sample([16, 64, 200], 1 if lossy else chance.choice([1, 1, 2]))
    groups = tuple(PromptGroup(length=n, count=1 if lossy else chance.choice([1, 2])) for n in lengths)
    machine = make_device_machine(
        int(chance.uniform(1.5, 3.6) * layers * MIB) + MIB,
        int(chance.choice([1.7, 2.2, 4, 8]) * layers * MIB) + MIB,
        link=chance.choice([2e8, 1e9, 5e9]),
        disk=chance.choice([1e8, 1e9]),
        host_attention=chance.choice([1e8, 1e9, 1e10]),
        flops=chance.choice([1e10, 1e11]),
        slowdown=chance.choice([1.0, 1.4, 2.0]),
        cores=chance.choice([2, 4, 6, 16]),
    )
    if lossy or layers == 2 or chance.random() < 0.7:
        (disk,) = machine.disks
        machine = machine.model_copy(update={"disks": (disk.model_copy(update={"read": disk.read[:1]}),)})
    limits = Limits(
        micro_batch=chance.choice([1, 2]),
        num_micro_batches=1 if layers == 2 or lossy else chance.choice([1, 1, 2]),
        weights_memory_bytes=chance.choice([None, None, None, int(chance.uniform(1.8, 4) * layers * MIB)]),
        threads=chance.choice([None, None, 3]),
    )
    work = Workload(prompts=groups, gen_len=chance.choice([2, 4]))
    quality: Quality = chance.choice(["int8", "any"]) if lossy else "exact"
    return Instance(Job(tiny_model(layers), work), machine, limits, quality)


def every_decision(domain: ChainDomain) -> Iterator[Decision]:
    """Every plan of the domain that fits."""
    model, memory = domain.model, domain.memory
    names = [t.name for t in model.tensors if t.is_matrix]
    assert len(names) == len(domain.placed), "all matrices are placed"
    placements = [dict(zip(names, tiers, strict=True)) for tiers in itertools.product(TIERS, repeat=len(names))]
    for (size, count), formats, kv_format, hidden, depth in itertools.product(
        domain.pairs, domain.formats, domain.kv_formats, ("device", "host"), (0, 1, 2)
    ):
        ways = list(itertools.product(PRODUCTS, PRODUCTS)) if formats else [("widen", "widen")]
        units = itertools.product(PLACES, repeat=count * model.num_layers)
        for (prefill, decode), kv, threads in itertools.product(ways, units, domain.terms.assignments):
            bare = Decision(
                micro_batch=size,
                num_micro_batches=count,
                formats=dict(formats),
                homes={},
                kv_format=kv_format,
                kv=tuple(kv[i * count : (i + 1) * count] for i in range(model.num_layers)),
                hidden=hidden,
                prefetch_depth=depth,
                runtime=own_runtime(),
                prefill_products=prefill,
                decode_products=decode,
                threads=threads,
                most_threads=domain.limits.threads,
            )
            if bare.host_attends and not depth:
                continue
            left = {tier: memory.capacity[tier] - sum(parts.values()) for tier, parts in memory.parts_beside_weights(bare).items()}
            if min(left.values()) < 0:
                continue
            kv_on_disk = any(unit.home == "disk" for unit in kv)
            for homes in placements:
                if "disk_io" not in threads and (kv_on_disk or "disk" in homes.values()):
                    continue
                decision = replace(bare, homes=homes)
                if _weights_fit(decision, domain, left):
                    yield decision


def _weights_fit(decision: Decision, domain: ChainDomain, left: dict[Tier, int]) -> bool:
    homes = {"device": 0, "host": 0, "disk": 0}
    rest: dict[int | None, dict[str, int]] = {}
    for tensor in domain.placed:
        size, home = decision.tensor_bytes(tensor), decision.homes[tensor.name]
        homes[home] += size
        of_layer = rest.setdefault(tensor.layer, {"device": 0, "host": 0, "disk": 0})
        of_layer[home] += size
    homes["device"] += decision.num_buffers * max(one["host"] + one["disk"] for one in rest.values())
    homes["host"] += decision.num_buffers * max(one["disk"] for one in rest.values())
    granted = homes["device"] + homes["host"] + domain.memory.vectors <= domain.memory.weights_capacity
    return granted and all(homes[tier] <= left[tier] for tier in TIERS)


def brute_force(instance: Instance, most: int = 10**9) -> tuple[float | None, int]:
    """(seconds of the best plan that fits, None where none does; plans simulated): no bound taken, nothing computed once for several units.
    Stops after `most` plans."""
    job, best, number = instance.job, None, 0
    known: dict[object, tuple[DeviceCosts, BatchPrices]] = {}
    for decision in every_decision(instance.search().domain):
        key = (tuple(decision.threads.items()), decision.num_micro_batches, decision.kv_format, decision.hidden)
        if key not in known:
            costs = costs_of(instance.machine, decision)
            known[key] = (costs, BatchPrices(job, costs, decision.kv_format, decision.hidden))
        work = ChainWork(job, known[key][0], decision, known[key][1])
        seconds = 0.0
        for block in job.blocks(decision.micro_batch, decision.num_micro_batches):
            steps = work.block(block)
            ends = [0.0, *lay_out(steps, decision.runtime, decision.prefetch_depth, Clock().emit)]
            for step, units, (begin, end) in zip(job.steps, steps, pairwise(ends), strict=True):
                least = max(busy_of(units).values()) if step.weight > 1 else 0.0
                seconds += block.count * step.weight * max(end - begin, least)
        best = seconds if best is None else min(best, seconds)
        number += 1
        if number >= most:
            break
    return best, number


def larger_instance(seed: int, *, free: bool = False) -> Instance:
    """Six layers that do not fit the device, and most often not the host either; the batch fixed, or `free`."""
    chance = random.Random(seed)
    machine = make_device_machine(
        int(chance.uniform(1.5, 6) * MIB),
        int(chance.choice([32, *(chance.uniform(2, 4.5) for _ in range(3))]) * MIB),
        link=chance.choice([2e8, 1e9, 5e9]),
        disk=chance.choice([1e8, 5e8]),
        host_attention=chance.choice([1e8, 1e9]),
        flops=chance.choice([1e10, 1e11]),
        slowdown=chance.choice([1.0, 1.4, 2.0]),
    )
    work = make_work(chance.choice([2, 8]), chance.choice([16, 64, 256]), 4)
    limits = Limits() if free else Limits(micro_batch=chance.choice([1, 2, 4]), num_micro_batches=chance.choice([1, 2]))
    return Instance(Job(make_model(6, 256, 512, stored="bf16"), work), machine, limits, "exact")


CHANGES = ("device_memory", "host_memory", "weights_memory", "link", "disk", "device_bandwidth", "rates", "threads")


def more_of(instance: Instance, change: str) -> Instance:
    """The same with more of one thing."""
    machine, limits = instance.machine, instance.limits
    accelerator = machine.accelerator
    assert accelerator is not None
    if change == "device_bandwidth":
        faster = accelerator.model_copy(update={"memory_bytes_per_s": 1.5 * accelerator.memory_bytes_per_s})
        return replace(instance, machine=machine.model_copy(update={"accelerator": faster}))
    if change == "threads":
        return replace(instance, limits=limits.model_copy(update={"threads": None if limits.threads is None else limits.threads + 2}))
    if change == "weights_memory":
        granted = limits.weights_memory_bytes
        return replace(instance, limits=limits.model_copy(update={"weights_memory_bytes": None if granted is None else granted + MIB // 2}))
    changes = {
        "device_memory": Change(resource="device_memory", added_bytes=MIB // 3),
        "host_memory": Change(resource="host_memory", added_bytes=MIB // 3),
        "link": Change(resource="link", factor=1.3),
        "disk": Change(resource="disk", factor=1.3),
        "rates": Change(resource="cores", factor=1.3),
    }
    on, granted = changed(machine, limits, changes[change])
    return replace(instance, machine=on, limits=granted)
