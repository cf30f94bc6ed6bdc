"""Plans for an emulated device against their runs.

python -m benchmarks.tiers errors MODEL [--cases 0-15]      sixteen plans over three link rates: is what they predict true?
python -m benchmarks.tiers policies MODEL [--device D]      the planner's own plan, and accelerate, zero-inference and flexgen at their best
python -m benchmarks.tiers ablations MODEL [--device D]     the planner's own plan, and the same without one of its means
MODEL is a checkpoint such as `lmoffload make-dummy shape:llama-1.1b DIR --layers 4` makes; --machine names a profile made by
`lmoffload profile`, unless this machine's own is meant. Nothing else may run meanwhile. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lmoffload.api.limits import emulated_device_of
from lmoffload.api.model import Model, open_model
from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload.profiler.store import load_profile
from lmoffload_solver.chain_plan import plan_of
from lmoffload_solver.chain_search import ChainSearch
from lmoffload_solver.chain_variants import KernelVariants
from lmoffload_solver.decision import Decision, Job, KVUnit
from lmoffload_solver.device_memory import memory_of
from lmoffload_solver.emulated import emulated
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.plan import Plan
from lmoffload_solver.policies.price import Policy, price_policy
from lmoffload_solver.runtime import Runtime
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


ERROR_CASES = (
    Case("256MiB@250MB/s", 16, 32, 8),
    Case("256MiB@1GB/s", 16, 32, 8),
    Case("256MiB@4GB/s", 16, 32, 8),
    Case("256MiB@250MB/s", 48, 32, 8, "exact", 16, 3),
    Case("256MiB@1GB/s", 48, 32, 8, "exact", 16, 3),
    Case("256MiB@4GB/s", 48, 32, 8, "exact", 16, 3),
    Case("320MiB@250MB/s", 32, 128, 6, "exact", 4, 8),
    Case("320MiB@1GB/s", 32, 128, 6, "exact", 4, 8),
    Case("320MiB@4GB/s", 8, 256, 6, "exact", 1, 8),
    Case("192MiB@250MB/s", 32, 32, 8, "int8"),
    Case("192MiB@1GB/s", 32, 64, 8, "int8", 8, 4),
    Case("192MiB@4GB/s", 32, 64, 8, "int4"),
    Case("192MiB@250MB/s", 64, 32, 8, "int4", 16, 4),
    Case("256MiB@1GB/s", 32, 32, 8, "exact", 8, 4, 820),
    Case("256MiB@4GB/s", 32, 32, 8, "exact", 16, 2, 820),
    Case("512MiB@1GB/s", 16, 64, 8),
)

GAIN = Case("320MiB@250MB/s", 384, 32, 16)
"""The issue's setting, for the shape of 1.1B parameters cut to 11 layers."""

POLICIES: tuple[Policy, ...] = ("flexgen", "zero-inference", "accelerate")


@dataclass(frozen=True)
class Measured:
    """A plan that was run."""

    name: str
    case: Case
    choices: str
    predicted_s: float
    measured_s: float
    step_s: float
    predicted_step_s: float
    predicted_peak: dict[str, int]
    measured_peak: dict[str, int]

    @property
    def error(self) -> float:
        """measured / predicted - 1 of the job's time."""
        return self.measured_s / self.predicted_s - 1


class Bench:
    """One model on one machine."""

    def __init__(self, model: Model, profile: MachineProfile) -> None:
        self.model, self.profile = model, profile

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

    def run(self, name: str, case: Case, plan: Plan) -> Measured:
        """Run a plan once, on synthetic prompts."""
        from lmoffload.executor import Engine, Sampling  # loads torch, whose environment `main` prepares
        from lmoffload.jobs.job import Options, synthetic_job

        job = synthetic_job(self.model.shape, case.num_prompts, case.prompt_len, Options(case.gen_len, Sampling(temperature=0.0), ()))
        with Engine(self.model.require_checkpoint(), plan) as engine:
            engine.generate(job.requests)
            report = engine.report()
        del engine
        gc.collect()  # a run's memory is not the next one's
        return Measured(
            name,
            case,
            in_words(plan),
            plan.predicted.total_s,
            report.measured.total_s,
            report.measured.step_s,
            plan.predicted.step_s,
            dict(plan.predicted.peak_bytes),
            dict(report.measured.peak_bytes),
        )


def in_words(plan: Plan) -> str:
    """A plan's choices in one line."""
    total = sum(plan.weights.bytes.values())
    weights = "/".join(f"{plan.weights.bytes[tier] / total:.0%}" for tier in ("device", "host", "disk"))
    formats = "/".join(dict.fromkeys(fmt for name, fmt in plan.weights.format.items() if name != "norm"))
    homes = "/".join(sorted({tier for _, _, tier in plan.kv.homes}))
    attends = f"host attends to {plan.attention.host_share:.0%}" if plan.attention.host else "device attends"
    block = f"{plan.num_micro_batches} x {plan.micro_batch}, {plan.prefetch_depth} ahead"
    return f"{formats} {weights}, kv {plan.kv.format.key} on {homes}, {attends}, hidden {plan.hidden.tier}, {block}, {plan.kernels.decode}"


def errors(bench: Bench, numbers: Sequence[int]) -> Iterator[Measured]:
    """The cases of these numbers."""
    for number in numbers:
        case = ERROR_CASES[number]
        yield bench.run(f"case {number}", case, bench.solved(case)[1])


def policies(bench: Bench, case: Case) -> Iterator[Measured]:
    """The planner's own plan, then the others', each at its own best batch."""
    yield bench.run("optimal", case, bench.solved(case)[1])
    for policy in POLICIES:
        limits = case.limits
        plan = price_policy(policy, bench.model.shape, bench.machine(case), case.workload, limits, digest=bench.model.digest)
        yield bench.run(policy, case, plan)


def ablations(bench: Bench, case: Case) -> Iterator[Measured]:
    """The planner's own plan of a class with quantization, then the same without one of its means; those that do not fit are left out."""
    decision, plan = bench.solved(case)
    yield bench.run("all means", case, plan)
    memory = memory_of(Job(bench.model.shape, case.workload), bench.machine(case), case.limits)
    fetched = tuple(tuple(KVUnit(unit.home, "device") for unit in units) for units in decision.kv)
    cores = max(bench.machine(case).host.cores, 1)
    changed = {
        "no overlap": replace(decision, runtime=Runtime(name="no overlap", overlap="none")),
        "no host attention": replace(decision, kv=fetched),
        "default threads": replace(decision, threads={**decision.threads, "compute": cores, "host_attention": cores}),
    }
    for name, other in changed.items():
        if other != decision and memory.fits(other):
            yield bench.run(name, case, bench.plan(case, other))
    yield bench.run("one micro-batch", case, bench.solved(replace(case, num_micro_batches=1))[1])
    for name, formats in (("quantization always", "all"), ("quantization never", "none")):
        yield bench.run(name, case, bench.solved(case, formats=formats)[1])


def show(console: Console, rows: Sequence[Measured]) -> None:
    """Predicted beside measured."""
    table = Table("plan", "device", "work", "choices", "predicted s", "measured s", "error", "step", "peak, predicted and measured MiB")
    for row in rows:
        work = f"{row.case.num_prompts} x {row.case.prompt_len} + {row.case.gen_len}, {row.case.quality}"
        peaks = ", ".join(f"{tier} {row.predicted_peak[tier] >> 20} {row.measured_peak.get(tier, 0) >> 20}" for tier in ("device", "host"))
        seconds = f"{row.predicted_s:.2f}", f"{row.measured_s:.2f}", f"{row.error:+.1%}", f"{row.predicted_step_s:.3f} {row.step_s:.3f}"
        table.add_row(row.name, row.case.device, work, row.choices, *seconds, peaks)
    console.print(table)
    absolute = [abs(row.error) for row in rows]
    console.print(f"median error {statistics.median(absolute):.1%}, largest {max(absolute):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "policies", "ablations"))
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--machine", help="a profile's file or name")
    parser.add_argument("--device", default=GAIN.device)
    parser.add_argument("--num-prompts", type=int, default=GAIN.num_prompts)
    parser.add_argument("--gen-len", type=int, default=GAIN.gen_len)
    parser.add_argument("--quality", default="exact", choices=("exact", "int8", "int4", "any"))
    parser.add_argument("--cases", default=f"0-{len(ERROR_CASES) - 1}", help="numbers of the cases of errors, first-last")
    parser.add_argument("--out", type=Path, help="append every run as a JSON line")
    options = parser.parse_args()
    prepare_threads()
    prepare_allocator()
    bench = Bench(open_model(options.model), load_profile(options.machine))
    case = replace(GAIN, device=options.device, num_prompts=options.num_prompts, gen_len=options.gen_len, quality=options.quality)
    if options.what == "errors":
        first, _, last = options.cases.partition("-")
        runs = errors(bench, range(int(first), int(last or first) + 1))
    else:
        runs = (policies if options.what == "policies" else ablations)(bench, case)
    rows = []
    for row in runs:
        rows.append(row)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row) | {"error": row.error}) + "\n")
    show(Console(width=240), rows)
    print(json.dumps([asdict(row) | {"error": row.error} for row in rows]))


if __name__ == "__main__":
    main()
