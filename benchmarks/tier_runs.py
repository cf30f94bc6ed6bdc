"""Plans for emulated devices, and their runs: what the benchmarks of tiers share."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from lmoffload.api.limits import emulated_device_of
from lmoffload.api.model import Model
from lmoffload_solver.chain_plan import decision_of, plan_of
from lmoffload_solver.chain_predict import costs_of, simulate_chain
from lmoffload_solver.chain_search import ChainSearch
from lmoffload_solver.chain_variants import KernelVariants
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.emulated import emulated
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.plan import Plan
from lmoffload_solver.policies.price import Policy, price_policy
from lmoffload_solver.report import RunReport
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits, PromptGroup, Workload

MIB = 2**20
SEARCH_S = 20.0


@dataclass(frozen=True)
class Case:
    """What is fixed of a plan; the planner chooses the rest."""

    device: str
    num_prompts: int
    prompt_len: int
    gen_len: int
    quality: Quality = "exact"
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    host_mib: int | None = None
    """Memory of the process without the device's."""

    @property
    def limits(self) -> Limits:
        return Limits(
            emulated_device=emulated_device_of(self.device),
            micro_batch=self.micro_batch,
            num_micro_batches=self.num_micro_batches,
            host_memory_bytes=None if self.host_mib is None else self.host_mib * MIB,
        )

    @property
    def workload(self) -> Workload:
        group = PromptGroup(length=self.prompt_len, count=self.num_prompts)
        return Workload(prompts=(group,), gen_len=self.gen_len, quality=self.quality)


@dataclass(frozen=True)
class Measured:
    """A plan that was run."""

    name: str
    model: str
    case: Case
    choices: str
    predicted_s: float
    measured_s: float
    step_s: float
    predicted_step_s: float
    busiest_step_s: float
    """Of the busiest resource in a decode step, contention included, as predicted."""
    predicted_peak: dict[str, int]
    measured_peak: dict[str, int]
    control_share: float = 0.0
    """Of the job's time, what the thread that hands tasks over worked."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Seconds on cores by class of tasks."""

    @property
    def error(self) -> float:
        """measured / predicted - 1 of the job's time."""
        return self.measured_s / self.predicted_s - 1

    @property
    def over_busiest(self) -> float:
        """A measured decode step over the busiest resource's own time in one."""
        return self.step_s / self.busiest_step_s if self.busiest_step_s else 1.0

    @property
    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"error": self.error, "over_busiest": self.over_busiest}


class Bench:
    """One model on one machine. predicted: nothing is run, and what is predicted stands for what is measured."""

    def __init__(self, model: Model, profile: MachineProfile, predicted: bool = False) -> None:
        self.model, self.profile, self.predicted = model, profile, predicted

    def solved(self, case: Case, *, formats: str | None = None) -> tuple[Decision, Plan]:
        """The best plan for a case. `formats`: "all" classes of matrices in the narrowest format, or "none"."""
        machine, job = self.machine(case), Job(self.model.shape, case.workload)
        search = ChainSearch(job, machine, machine.disks[0], case.limits, case.quality, time.perf_counter() + SEARCH_S)
        if formats is not None:
            variants = search.domain.variants
            assert isinstance(variants, KernelVariants)
            wanted = max(map(len, variants.formats)) if formats == "all" else 0
            variants.formats = tuple(one for one in variants.formats if len(one) == wanted)
            search.domain.kv_formats = search.domain.kv_formats[-1:] if formats == "all" else search.domain.kv_formats[:1]
        found = search.run()
        assert found is not None, f"no plan for {case}"
        return found.decision, self.plan(case, found.decision)

    def plan(self, case: Case, decision: Decision) -> Plan:
        """The plan of a decision."""
        machine, job = self.machine(case), Job(self.model.shape, case.workload)
        return plan_of(job, machine, decision, digest=self.model.digest, limits=case.limits)

    def machine(self, case: Case) -> MachineProfile:
        """The machine with a case's device."""
        return emulated(self.profile, emulated_device_of(case.device))

    def by_policy(self, policy: Policy, case: Case) -> Plan:
        """Another system's plan, at its own best batch."""
        return price_policy(policy, self.model.shape, self.machine(case), case.workload, case.limits, digest=self.model.digest)

    def busiest_step_s(self, case: Case, plan: Plan) -> float:
        """See `Measured`."""
        job, decision = Job(self.model.shape, case.workload), decision_of(self.model.shape, plan)
        decode = simulate_chain(job, costs_of(self.machine(case), decision), decision).decode
        return plan.predicted.step_s * max(decode.busy.values()) / decode.seconds if decode.seconds else 0.0

    def run(self, name: str, case: Case, plan: Plan) -> Measured:
        """Run a plan once, on synthetic prompts."""
        report = None if self.predicted else self._reported(case, plan)
        measured = plan.predicted if report is None else report.measured
        return Measured(
            name,
            self.model.shape.name,
            case,
            in_words(plan),
            plan.predicted.total_s,
            measured.total_s,
            measured.step_s,
            plan.predicted.step_s,
            self.busiest_step_s(case, plan),
            dict(plan.predicted.peak_bytes),
            dict(measured.peak_bytes),
            0.0 if report is None else (report.control_s or 0.0) / measured.total_s,
            {} if report is None else {task: figures.cpu_s for task, figures in report.threads.items()},
        )

    def _reported(self, case: Case, plan: Plan) -> RunReport:
        from lmoffload.executor import Engine, Sampling  # loads torch, whose environment `main` prepares
        from lmoffload.jobs.job import Options, synthetic_job

        job = synthetic_job(self.model.shape, case.num_prompts, case.prompt_len, Options(case.gen_len, Sampling(temperature=0.0), ()))
        with Engine(self.model.require_checkpoint(), plan) as engine:
            engine.generate(job.requests)
            report = engine.report()
        del engine
        gc.collect()  # a run's memory is not the next one's
        return report


def in_words(plan: Plan) -> str:
    """A plan's choices in one line."""
    total = sum(plan.weights.bytes.values())
    weights = "/".join(f"{plan.weights.bytes[tier] / total:.0%}" for tier in ("device", "host", "disk"))
    formats = "/".join(dict.fromkeys(fmt for name, fmt in plan.weights.format.items() if name != "norm"))
    homes = "/".join(sorted({tier for _, _, tier in plan.kv.homes}))
    attends = f"host attends to {plan.attention.host_share:.0%}" if plan.attention.host else "device attends"
    block = f"{plan.num_micro_batches} x {plan.micro_batch}, {plan.prefetch_depth} ahead"
    return f"{formats} {weights}, kv {plan.kv.format.key} on {homes}, {attends}, hidden {plan.hidden.tier}, {block}, {plan.kernels.decode}"
