"""Plans against their runs: are predictions true (errors), and is the chosen plan the quickest (regret)?

python benchmarks/plans.py errors MODEL... [--out FILE]      nine plans of every model, chosen here and nowhere else
python benchmarks/plans.py regret MODEL... [--out FILE]      the planner's own plan against at least twenty others, two limits each
The machine's profile must be there. Under limits, run each through benchmarks/limited; the disk is measured anew within them. The last line
of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lmoffload.api.model import Model, open_model
from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload.profiler.disk import measure_disk
from lmoffload.profiler.store import load_profile
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.outcome import plan_in
from lmoffload_solver.plan import Plan
from lmoffload_solver.search import solve
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits, PromptGroup, Workload


@dataclass(frozen=True)
class Case:
    """What is fixed of a plan; the planner chooses the rest."""

    quality: Quality
    num_prompts: int
    prompt_len: int
    gen_len: int
    weights_share: float | None = None
    """Of the stored weights, for homes and buffers."""
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    kernels: tuple[str, ...] = ()
    """Kernels that may be used; all where empty."""


ERROR_CASES = (
    Case("exact", 16, 64, 8, 0.4),
    Case("exact", 8, 128, 8),
    Case("exact", 32, 64, 8, 0.6, 8, 4, ("widen_tiles",)),
    Case("exact", 1, 32, 16, 0.5),
    Case("int8", 16, 64, 8, 0.3),
    Case("int8", 24, 32, 8, 0.3, 8, 3, ("fused_dot",)),
    Case("int4", 32, 32, 8, 0.2),
    Case("int4", 16, 64, 8),
    Case("int4", 16, 64, 8, 0.2, 4, 4, ("fused_dot", "widen_tiles")),
)

REGRET_WORK = (32, 64, 8)
"""Prompts, their length, new tokens."""
REGRET_SHARES = (0.2, 0.5)
REGRET_BATCHES = ((32, 1), (16, 2), (8, 4), (16, 1), (8, 1))
FINALISTS = 4
"""The quickest, which are run again."""
REGRET_QUALITIES: tuple[Quality, ...] = ("exact", "int8", "int4")


@dataclass(frozen=True)
class Measured:
    """A plan that was run."""

    model: str
    case: Case
    choices: str
    predicted_s: float
    measured_s: float
    predicted_peak: int
    measured_peak: int

    @property
    def error(self) -> float:
        """measured / predicted - 1 of the job's time."""
        return self.measured_s / self.predicted_s - 1


def planned(model: Model, machine: MachineProfile, case: Case) -> Plan | None:
    """The best plan with a case's choices; None where there is none."""
    work = Workload(prompts=(PromptGroup(length=case.prompt_len, count=case.num_prompts),), gen_len=case.gen_len, quality=case.quality)
    limits = Limits(weights_memory_share=case.weights_share, micro_batch=case.micro_batch, num_micro_batches=case.num_micro_batches)
    if case.kernels:
        machine = machine.model_copy(update={"linear": tuple(c for c in machine.linear if c.kernel in case.kernels)})
    return plan_in(solve(model.shape, machine, work, limits, model_fingerprint=model.digest))


def run(model: Model, case: Case, plan: Plan) -> Measured:
    """Run a plan once, alone, on synthetic prompts."""
    from lmoffload.executor import Engine, Sampling  # loads torch, whose environment `main` prepares
    from lmoffload.jobs.job import Options, synthetic_job

    job = synthetic_job(model.shape, case.num_prompts, case.prompt_len, Options(case.gen_len, Sampling(temperature=0.0), ()))
    with Engine(model.require_checkpoint(), plan) as engine:
        engine.generate(job.requests)
        report = engine.report()
    del engine
    gc.collect()  # a run's memory is not the next one's
    return Measured(
        model.shape.name,
        case,
        in_words(plan),
        plan.predicted.total_s,
        report.measured.total_s,
        plan.predicted.peak_bytes["host"],
        report.peak_rss_bytes,
    )


def in_words(plan: Plan) -> str:
    """A plan's choices in one line."""
    formats = "/".join(dict.fromkeys(fmt for name, fmt in plan.weights.format.items() if name != "norm"))
    total = sum(plan.weights.bytes.values())
    block = f"{plan.num_micro_batches} x {plan.micro_batch}"
    streams = f"{plan.weights.bytes['disk'] / total:.0%} on disk by {plan.stream}, {plan.prefetch_depth} ahead"
    return f"{formats}, kv {plan.kv.format.key}, {block}, {plan.kernels.prefill} then {plan.kernels.decode}, {streams}"


def errors(model: Model, machine: MachineProfile, console: Console) -> Iterator[Measured]:
    """Every case of a model."""
    for case in ERROR_CASES:
        plan = planned(model, machine, case)
        if plan is None:
            console.print(f"{model.shape.name}: no plan for {case}")
            continue
        yield run(model, case, plan)


def regret(model: Model, machine: MachineProfile, shares: Sequence[float]) -> Iterator[tuple[Measured, list[Measured]]]:
    """For each limit the planner's own plan, and the best of every other batch and quality class that it may use, each run once; then those
    that were quickest and the planner's own twice more, in turn: the quickest of many runs is so by luck, too."""
    for share in shares:
        own = Case("int4", *REGRET_WORK, share)
        plan = planned(model, machine, own)
        assert plan is not None, "the planner has a plan of its own"
        others = [
            replace(own, quality=quality, micro_batch=size, num_micro_batches=count, kernels=kernels)
            for quality, (size, count), kernels in product(REGRET_QUALITIES, REGRET_BATCHES, ((), ("fused_dot",)))
        ]
        plans = {plan.model_dump_json(exclude={"solve_s", "quality", "workload"}): (own, plan)}
        for case in others:
            other = planned(model, machine, case)
            if other is not None:
                plans.setdefault(other.model_dump_json(exclude={"solve_s", "quality", "workload"}), (case, other))
        tried = list(plans.values())
        once = [run(model, case, other) for case, other in tried]
        quickest = sorted(range(1, len(tried)), key=lambda i: once[i].measured_s)[:FINALISTS]
        runs = {i: [once[i]] for i in (0, *quickest)}
        for _ in range(2):
            for i, of_plan in runs.items():
                of_plan.append(run(model, *tried[i]))
        for i, of_plan in runs.items():
            once[i] = sorted(of_plan, key=lambda measured: measured.measured_s)[1]
        yield once[0], once[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "regret"))
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--shares", nargs="+", type=float, default=REGRET_SHARES, help="of the weights in memory, for regret")
    parser.add_argument("--out", type=Path, help="append every run as a JSON line")
    options = parser.parse_args()
    prepare_threads()
    prepare_allocator()
    console = Console(width=200)
    rows: list[Measured] = []
    ratios: dict[str, float] = {}
    for name in options.models:
        model = open_model(name)
        assert model.path is not None, "a checkpoint with weights"
        profile = load_profile(None)
        machine = profile.model_copy(update={"disks": (measure_disk(model.path, quick=True),)})
        if options.what == "errors":
            rows += errors(model, machine, console)
            continue
        for number, (chosen, others) in enumerate(regret(model, machine, options.shares)):
            best = min([chosen, *others], key=lambda measured: measured.measured_s)
            ratios[f"{model.shape.name}, {options.shares[number]:.0%} of the weights"] = best.measured_s / chosen.measured_s
            told = f"{chosen.choices} was chosen ({chosen.measured_s:.2f} s), and {best.choices} the quickest ({best.measured_s:.2f} s)"
            console.print(f"{model.shape.name}: of {len(others) + 1} plans {told}")
            rows += [chosen, *others]
    show(rows, console)
    for what, ratio in ratios.items():
        console.print(f"{what}: the chosen plan reaches {ratio:.3f} of the best")
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    sizes = [abs(row.error) for row in rows]
    print(json.dumps({"runs": len(rows), "median_error": statistics.median(sizes), "worst_error": max(sizes), "regret": ratios}))


def show(rows: list[Measured], console: Console) -> None:
    """A table of runs."""
    table = Table("model", "plan", "predicted s", "measured s", "error", "peak MiB", "planned MiB")
    for row in rows:
        peaks = f"{row.measured_peak / 2**20:.0f}", f"{row.predicted_peak / 2**20:.0f}"
        table.add_row(row.model, row.choices, f"{row.predicted_s:.2f}", f"{row.measured_s:.2f}", f"{row.error:+.1%}", *peaks)
    console.print(table)


if __name__ == "__main__":
    main()
