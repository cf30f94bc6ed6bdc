"""Plans for an emulated device against their runs.

python -m benchmarks.tiers errors MODEL [--cases 0-15]      sixteen plans over three link rates: is what they predict true?
python -m benchmarks.tiers policies MODEL [--device D]      the planner's own plan, and accelerate, zero-inference and flexgen at their best
python -m benchmarks.tiers settings MODEL MODEL             the same but for accelerate, of two models behind links of three rates
python -m benchmarks.tiers ablations MODEL [--device D]     the planner's own plan, and the same without one of its means
python -m benchmarks.tiers capacity MODEL [--plans 50]      plans at random, on one device and on two: is what they take within the plan?
MODEL is a checkpoint such as `lmoffload make-dummy shape:llama-1.1b DIR --layers 4` makes; --machine names a profile made by
`lmoffload profile`, unless this machine's own is meant. Nothing else may run meanwhile, but for capacity. --predicted tells what the plans
predict and runs nothing. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.tier_capacity import Taken, capacity
from benchmarks.tier_runs import Bench, Case, Measured
from lmoffload.api.model import open_model
from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload.profiler.store import load_profile
from lmoffload_solver.decision import Job, KVUnit
from lmoffload_solver.device_memory import memory_of
from lmoffload_solver.policies.price import Policy
from lmoffload_solver.runtime import Runtime

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

RATES = ("250MB/s", "1GB/s", "4GB/s")

SETTING = Case("256MiB@1GB/s", 64, 32, 8)
"""Of each model behind each link; small enough that all eighteen runs take minutes."""

PUBLISHED = {"flexgen": 2.34, "zero-inference": 1.57}
"""Gains that the thesis on LM-Offload reports over these systems, geometric means over its settings."""

TOLD_SHARE = 0.1
"""A plan that is predicted to be slower by so much has to be slower."""


def errors(bench: Bench, numbers: Sequence[int]) -> Iterator[Measured]:
    """The cases of these numbers."""
    for number in numbers:
        case = ERROR_CASES[number]
        yield bench.run(f"case {number}", case, bench.solved(case)[1])


def policies(bench: Bench, case: Case, others: Sequence[Policy] = POLICIES) -> Iterator[Measured]:
    """The planner's own plan, then the others', each at its own best batch."""
    yield bench.run("optimal", case, bench.solved(case)[1])
    for policy in others:
        yield bench.run(policy, case, bench.by_policy(policy, case))


def ablations(bench: Bench, case: Case) -> Iterator[Measured]:
    """The planner's own plan, then the same without one of its means; those that do not fit are left out."""
    decision, plan = bench.solved(case)
    yield bench.run("optimal", case, plan)
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
        step = f"{row.predicted_step_s:.3f} {row.step_s:.3f}, {row.over_busiest:.2f} x busiest"
        seconds = f"{row.predicted_s:.2f}", f"{row.measured_s:.2f}", f"{row.error:+.1%}"
        table.add_row(row.name, row.case.device, work, row.choices, *seconds, step, peaks)
    console.print(table)
    absolute = [abs(row.error) for row in rows]
    console.print(f"error: median {statistics.median(absolute):.1%}, largest {max(absolute):.1%}")
    ratios = [row.over_busiest for row in rows if row.name not in (*POLICIES, "no overlap")]
    console.print(f"control: at most {max(row.control_share for row in rows):.2%} of a job's time")
    for row in rows:
        told = ", ".join(f"{task} {seconds:.1f}" for task, seconds in row.cpu_s.items())
        console.print(f"{row.name}: seconds on cores {told or 'not measured'}")
    console.print(f"decode step over the busiest resource's own time, of plans that overlap: largest {max(ratios):.2f}")


def show_gains(console: Console, rows: Sequence[Measured]) -> dict[str, float]:
    """How many times as long each plan takes as the optimal one of its setting; whether the order is the predicted one. Returns measured
    gains, geometric means over the settings."""
    settings: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        settings.setdefault((row.model, row.case.device), []).append(row)
    gains: dict[str, list[float]] = {}
    for (model, device), (optimal, *others) in settings.items():
        for row in others:
            predicted, measured = row.predicted_s / optimal.predicted_s, row.measured_s / optimal.measured_s
            gains.setdefault(row.name, []).append(measured)
            told = "slower, as told" if measured > 1 else "NOT slower" if predicted >= 1 + TOLD_SHARE else "told to be alike"
            console.print(f"{model}, {device}, {row.name}: {measured:.2f} x the optimal plan's time, predicted {predicted:.2f}: {told}")
        of = [optimal, *others]
        orders = [[row.name for row in sorted(of, key=key)] for key in (lambda row: row.predicted_s, lambda row: row.measured_s)]
        verdict = "as measured" if orders[0] == orders[1] else f"measured {' < '.join(orders[1])}"
        console.print(f"{model}, {device}, order of times predicted {' < '.join(orders[0])}: {verdict}")
    means = {name: statistics.geometric_mean(found) for name, found in gains.items()}
    for name, mean in means.items():
        published = f", published {PUBLISHED[name]}" if name in PUBLISHED else ""
        console.print(f"gain over {name}: {mean:.2f} (geometric mean of {len(gains[name])}){published}")
    return means


def show_taken(console: Console, found: Sequence[Taken]) -> None:
    """Bytes of each tier, the closest plan and whether all are within."""
    for tier in ("device", "host", "disk"):
        shares = [one.taken[tier] / one.planned[tier] for one in found if one.planned[tier]]
        console.print(f"{tier}: {len(shares)} plans take {min(shares, default=0):.1%} to {max(shares, default=0):.1%} of what they plan")
    over = [one for one in found if not one.within]
    console.print(f"{len(found)} plans, {len(over)} beyond their plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "policies", "settings", "ablations", "capacity"))
    parser.add_argument("model", metavar="MODEL", nargs="+")
    parser.add_argument("--machine", help="a profile's file or name")
    parser.add_argument("--device", default=GAIN.device)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--gen-len", type=int)
    parser.add_argument("--quality", default="exact", choices=("exact", "int8", "int4", "any"))
    parser.add_argument("--cases", default=f"0-{len(ERROR_CASES) - 1}", help="numbers of the cases of errors, first-last")
    parser.add_argument("--plans", type=int, default=50, help="of capacity")
    parser.add_argument("--predicted", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, help="append every run as a JSON line")
    options = parser.parse_args()
    prepare_threads()
    prepare_allocator()
    console = Console(width=240)
    models = [open_model(name) for name in options.model]
    if options.what == "capacity":
        with tempfile.TemporaryDirectory() as folder:
            found = list(capacity(models[0].require_checkpoint(), options.plans, Path(folder)))
        show_taken(console, found)
        print(json.dumps([one.document for one in found]))
        return
    base = SETTING if options.what == "settings" else GAIN
    given = {"num_prompts": options.num_prompts, "gen_len": options.gen_len}
    case = replace(base, quality=options.quality, **{name: number for name, number in given.items() if number is not None})
    profile = load_profile(options.machine)
    benches = [Bench(model, profile, options.predicted) for model in models]
    rows = []
    for row in runs_of(options, benches, case):
        rows.append(row)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.document) + "\n")
    show(console, rows)
    gains = show_gains(console, rows) if options.what != "errors" else {}
    print(json.dumps({"runs": [row.document for row in rows], "gains": gains}))


def runs_of(options: argparse.Namespace, benches: Sequence[Bench], case: Case) -> Iterator[Measured]:
    """The runs that are asked for."""
    if options.what == "errors":
        first, _, last = options.cases.partition("-")
        yield from errors(benches[0], range(int(first), int(last or first) + 1))
    elif options.what == "settings":
        memory, _, _ = case.device.partition("@")
        for bench in benches:
            for rate in RATES:
                yield from policies(bench, replace(case, device=f"{memory}@{rate}"), POLICIES[:2])
    else:
        run = policies if options.what == "policies" else ablations
        yield from run(benches[0], replace(case, device=options.device))


if __name__ == "__main__":
    main()
