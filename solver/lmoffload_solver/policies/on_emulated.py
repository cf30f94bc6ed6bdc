"""Other systems' policies on an emulated device: what each would place where, run by this engine.

The placement, the batch, what overlaps and who attends are the system's; products, formats and copies are this engine's, so that plans
differ from its own by the policy alone. Each computes with all cores, as the libraries do. A batch that a system leaves to its user is the
best of a sweep.

accelerate: a device map filled in the model's order, whole layers at a time; fetched on demand, one thing after another; keys and values on
the device. zero-inference: every weight in the slow tier, the next layer fetched while one computes; keys and values on the device, or on
the host, which attends to them. flexgen: percentages of weights, cache and hidden states, the same of every layer; its own program knows
OPT alone, so of each batch, home of the cache and home of the hidden states the most weights that fit go nearest, and the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lmoffload_solver import counting
from lmoffload_solver.chain_domain import ChainCandidate, ChainDomain
from lmoffload_solver.chain_predict import costs_of, simulate_chain
from lmoffload_solver.chain_variants import Formats
from lmoffload_solver.costs import disk_of
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.errors import InfeasibleError
from lmoffload_solver.formats import QUALITY_BITS
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.policies.accelerate import accelerate_decision
from lmoffload_solver.policies.flexgen_granularity import tensor_homes
from lmoffload_solver.policies.zero_inference import zero_decision
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.value import TaskClass, TensorClass, Tier
from lmoffload_solver.workload import Limits

PERCENT_STEP = 20
"""Of weights."""

ON_DEVICE, FETCHED, ATTENDED = KVUnit("device", "device"), KVUnit("host", "device"), KVUnit("host", "host")

FOUR_BITS = "int4-g64"


def emulated_decision(policy: str, job: Job, machine: MachineProfile, limits: Limits, file_system: str | None) -> Decision:
    """What a system would choose for a job.

    Raises:
        InfeasibleError: none of its batches fits.
        StatedError: the profile lacks a curve.
    """
    sweep = PolicySweep(policy, job, machine, limits, file_system)
    best: Decision | None = None
    for decision in sweep.decisions():
        seconds = simulate_chain(job, costs_of(machine, decision, file_system), decision).total_s
        if seconds < sweep.best_s:
            best, sweep.best_s = decision, seconds
    if best is None:
        raise InfeasibleError(f"The policy of {policy} fits no batch of this work on {machine.name}; give it more --device-memory.")
    return best


class PolicySweep:
    """Every decision that a system's user may come to, but for batches that are slower than `best_s` by the device's work alone."""

    def __init__(self, policy: str, job: Job, machine: MachineProfile, limits: Limits, file_system: str | None) -> None:
        self.policy, self.job, self.model = policy, job, job.model
        if policy != "flexgen":
            limits = limits.model_copy(update={"num_micro_batches": 1})
        self.domain = ChainDomain(job, machine, disk_of(machine, file_system), limits, job.workload.quality)
        self.memory = self.domain.memory
        self.formats = self._formats()
        self._kernels = [self.domain.variants.quickest(self.formats, phase) for phase in (0, 1)]
        self.best_s = float("inf")
        threads = self.domain.terms.assignments
        self.threads: dict[TaskClass, int] = max(threads, key=lambda one: (one["compute"], one["host_attention"]))

    def _formats(self) -> Formats:
        """4 bits of the layers' matrices where the quality class allows them and the system knows them."""
        if QUALITY_BITS[self.job.workload.quality] > 4 or self.policy == "accelerate":
            return ()
        matrices = [t for t in self.model.tensors if t.is_matrix and t.layer is not None]
        classes: dict[TensorClass, bool] = {}
        for tensor in matrices:
            classes[tensor.tensor_class] = classes.get(tensor.tensor_class, True) and tensor.can_become(FOUR_BITS)
        return tuple((name, FOUR_BITS) for name, can in classes.items() if can)

    def decisions(self) -> Iterator[Decision]:
        """Those that fit."""
        make = {"accelerate": self._accelerate, "zero-inference": self._zero, "flexgen": self._flexgen}[self.policy]
        for number in sorted(range(len(self.domain.pairs)), key=self._least_s):
            size, count = self.domain.pairs[number]
            if self._least_s(number) >= self.best_s:
                return
            for decision in make(size, count):
                ours = replace(
                    decision,
                    formats=dict(self.formats),
                    kv_format=self.domain.base_format,
                    prefill_products=self._kernels[0][number],
                    decode_products=self._kernels[1][number],
                    threads=self.threads,
                    most_threads=self.domain.limits.threads,
                )
                if self.memory.fits(ours):
                    yield ours
                    if self.policy == "accelerate":
                        break

    def _least_s(self, number: int) -> float:
        """Seconds of the device's work alone with a batch."""
        products = self._kernels[0][number], self._kernels[1][number]
        assignment = self.domain.terms.assignments.index(self.threads)
        candidate = ChainCandidate(*self.domain.pairs[number], self.formats, self.domain.base_format, "device", products, 1)
        return self.domain.least_s(replace(candidate, assignment=assignment))

    def _runtime(self) -> Runtime:
        return Runtime(name=self.policy, overlap="none" if self.policy == "accelerate" else "barriers")

    def _accelerate(self, size: int, count: int) -> Iterator[Decision]:
        """The fullest map first; less of the device where what is fetched needs more room than its greedy rule leaves."""
        bare = self._placed(size, 1, ON_DEVICE, "device", {t.name: "disk" for t in self.model.tensors if t.is_matrix}, 0)
        beside = self.memory.parts_beside_weights(bare)
        room = {tier: self.memory.capacity[tier] - sum(beside[tier].values()) for tier in beside}
        layer = sum(counting.tensor_bytes(t) for t in counting.layer_matrices(self.model, 0))
        for less in range(self.model.num_layers + 2):
            device, host = (max(0, room[tier] - less * layer) for tier in ("device", "host"))
            decision = accelerate_decision(self.model, size, device, host if room["device"] >= 0 else 0)
            yield replace(decision, runtime=self._runtime())

    def _zero(self, size: int, count: int) -> Iterator[Decision]:
        for tier in ("host", "disk"):
            for offload in (False, True):
                yield replace(zero_decision(self.model, size, tier, kv_offload=offload), runtime=self._runtime())

    def _flexgen(self, size: int, count: int) -> Iterator[Decision]:
        for unit in (ON_DEVICE, FETCHED, ATTENDED):
            for hidden in ("device", "host"):
                found = self._fullest(size, count, unit, hidden)
                if found is not None:
                    yield found

    def _fullest(self, size: int, count: int, unit: KVUnit, hidden: Tier) -> Decision | None:
        """The most weights on the device, then on the host, that fit."""
        for on_device in range(100, -1, -PERCENT_STEP):
            for on_host in range(100 - on_device, -1, -PERCENT_STEP):
                decision = self._placed(size, count, unit, hidden, tensor_homes(self.model, on_device, on_host), 1)
                parts = self.memory.parts(decision)
                if sum(parts["device"].values()) > self.memory.capacity["device"]:
                    break
                if self.memory.fits(decision):
                    return decision
        return None

    def _placed(self, size: int, count: int, unit: KVUnit, hidden: Tier, homes: dict[str, Tier], depth: int) -> Decision:
        return Decision(
            micro_batch=size,
            num_micro_batches=count,
            formats=dict(self.formats),
            homes=homes,
            kv_format=self.domain.base_format,
            kv=((unit,) * count,) * self.model.num_layers,
            hidden=hidden,
            prefetch_depth=depth,
            runtime=self._runtime(),
            threads=self.threads,
        )
