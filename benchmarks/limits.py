"""Runs against what the machine allows: the disk's rate where reading binds, the layers' own kernels back to back where computing does.

python -m benchmarks.limits MODEL...      Llamas, such as `lmoffload make-dummy shape:llama-1.1b DIR --layers 6` makes
The machine's profile must be there. Under a limit of reading, run it through benchmarks/limited; the disk is measured anew within it.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.plans import Case, in_words, planned
from lmoffload.api.model import Model, open_model
from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload.profiler.disk import measure_disk
from lmoffload.profiler.store import load_profile
from lmoffload.profiler.weights import WeightSlab
from lmoffload_solver import counting
from lmoffload_solver.costs import DiskCosts
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.plan import Plan, kernel_for
from lmoffload_solver.report import RunReport
from lmoffload_solver.schedule import READ_REQUEST_BYTES, units_of

READING = (Case("exact", 16, 64, 8, 0.3), Case("int8", 16, 64, 8, 0.3), Case("int4", 32, 64, 8, 0.2))
COMPUTING = (Case("exact", 16, 64, 24), Case("int8", 16, 64, 24), Case("int4", 16, 64, 24))
REPEATS = 9
WARM_STEPS = 3
"""From then on rows stand: their layers are done again as they were recorded."""


@dataclass(frozen=True)
class Held:
    """A phase of a run against its limit."""

    model: str
    choices: str
    phase: str
    binds: str
    measured_s: float
    limit_s: float

    @property
    def times(self) -> float:
        return self.measured_s / self.limit_s


def run(model: Model, case: Case, plan: Plan) -> tuple[RunReport, dict[int, float]]:
    """Of the second of two runs on synthetic prompts (the first one makes a store, too): its report, and seconds of the layers by step."""
    from lmoffload.executor import Engine, Sampling  # loads torch, whose environment `main` prepares
    from lmoffload.jobs.job import Options, synthetic_job

    job = synthetic_job(model.shape, case.num_prompts, case.prompt_len, Options(case.gen_len, Sampling(temperature=0.0), ()))
    for _ in range(2):
        layers: dict[int, float] = {}
        with Engine(model.require_checkpoint(), plan, keep_spans=True) as engine:
            engine.generate(job.requests)
            report = engine.report()
            for span in engine.meter.spans:
                if span.task.kind == "compute" and engine.units[span.task.unit].kind == "layer":
                    layers[span.task.step] = layers.get(span.task.step, 0.0) + span.end_s - span.begin_s
        del engine
        gc.collect()
    return report, layers


def reading(model: Model, machine: MachineProfile) -> Iterator[Held]:
    """Decode steps that wait for the disk."""
    for case in READING:
        plan = planned(model, machine, case)
        assert plan is not None, "a share of the weights fits"
        best = DiskCosts(machine.disks[0], plan.threads["disk_io"]).best_rate(READ_REQUEST_BYTES)
        limit_s = counting.moved_bytes(units_of(model.shape, plan)) / best
        if plan.binding == "disk_read":
            yield Held(model.shape.name, in_words(plan), "decode step", "reading", run(model, case, plan)[0].measured.step_s, limit_s)


def computing(model: Model, machine: MachineProfile) -> Iterator[Held]:
    """Prefills and decode steps of models that are in memory."""
    for case in COMPUTING:
        plan = planned(model, machine, case)
        assert plan is not None, "the weights fit"
        assert case.num_prompts == plan.micro_batch * plan.num_micro_batches, "one block"
        report, layers = run(model, case, plan)
        for phase, kernel, tokens, measured_s in (
            ("prefill", plan.kernels.prefill, plan.micro_batch * case.prompt_len, layers[0]),
            ("decode", plan.kernels.decode, plan.micro_batch, statistics.median(layers[step] for step in layers if step >= WARM_STEPS)),
        ):
            steps = 1 if phase == "prefill" else case.gen_len - 1
            attention_s = sum(one.seconds for one in report.performed.attentions if one.phase == phase) / steps
            limit_s = plan.num_micro_batches * kernels_s(model, plan, kernel, tokens) + attention_s
            yield Held(model.shape.name, in_words(plan), f"layers, {phase}", "computing", measured_s, limit_s)


def kernels_s(model: Model, plan: Plan, kernel: str, tokens: int) -> float:
    """Median seconds of all kernels of the model's layers but attention, over so many tokens: one call right after another, few tokens
    without Python between them, weights as large as the model's, in turn."""
    import torch

    from lmoffload.kernels.elementwise import add, rms_norm, rotate, silu_gate
    from lmoffload.kernels.linear import linear
    from lmoffload.kernels.pool import Pool
    from lmoffload.kernels.runs import Rooms

    shape, layer = model.shape, model.shape.layers[0]
    by_format: dict[str, list[tuple[int, int]]] = {}
    for tensor in (t for i in range(shape.num_layers) for t in counting.layer_matrices(shape, i)):
        by_format.setdefault(plan.weights.tensors[tensor.name].format, []).append(counting.matrix_size(tensor))
    slabs = {fmt: WeightSlab(1 << 30) for fmt in by_format}
    found = {(fmt, size): slabs[fmt].matrices(fmt, *size) for fmt, sizes in by_format.items() for size in dict.fromkeys(sizes)}
    hidden, weight = torch.randn(tokens, shape.hidden_size), torch.ones(shape.hidden_size)
    cos, sin = torch.rand(tokens, layer.key_dim), torch.rand(tokens, layer.key_dim)
    few = tokens * shape.hidden_size <= counting.FEW_NUMBERS

    with Pool(plan.threads["compute"]) as pool:

        def product(x: torch.Tensor, name: str) -> torch.Tensor:
            fmt = plan.weights.tensors[name].format
            return linear(x, next(found[fmt, counting.matrix_size(shape.by_name[name])]), kernel_for(kernel, fmt), pool)

        def layer_kernels(index: int) -> None:
            q, k, v, o, gate, up, down = (tensor.name for tensor in counting.layer_matrices(shape, index))
            normed = rms_norm(hidden, weight, 1e-5, pool)
            query, key, _ = pool.beside([lambda name=name: product(normed, name) for name in (q, k, v)])  # type: ignore[misc]
            rotate([heads.view(tokens, -1, layer.key_dim) for heads in (query, key)], cos, sin, pool)
            add(hidden, product(query, o), pool)
            normed = rms_norm(hidden, weight, 1e-5, pool)
            gated = silu_gate(*pool.beside([lambda name=name: product(normed, name) for name in (gate, up)]), pool)  # type: ignore[misc]
            add(hidden, product(gated, down), pool)

        def whole() -> None:
            for index in range(shape.num_layers):
                runs[index]() if few else layer_kernels(index)

        runs = []
        if few:
            for index in range(shape.num_layers):
                _, recorded = pool.together(lambda index=index: layer_kernels(index), Rooms())  # type: ignore[misc]
                assert recorded is not None
                runs.append(lambda recorded=recorded: pool.again(recorded))
        times_s = []
        with torch.no_grad():
            for _ in range(1 + REPEATS):
                begin_s = time.perf_counter()
                whole()
                times_s.append(time.perf_counter() - begin_s)
        return statistics.median(times_s[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    options = parser.parse_args()
    prepare_threads()
    prepare_allocator()
    found: list[Held] = []
    for name in options.models:
        model = open_model(name)
        assert model.path is not None, "a checkpoint with weights"
        machine = load_profile(None)
        found += computing(model, machine)
        found += reading(model, machine.model_copy(update={"disks": (measure_disk(model.path, quick=True),)}))
    table = Table("model", "plan", "phase", "binds", "measured ms", "limit ms", "times")
    for one in found:
        seconds = f"{one.measured_s * 1e3:.1f}", f"{one.limit_s * 1e3:.1f}"
        table.add_row(one.model, one.choices, one.phase, one.binds, *seconds, f"{one.times:.2f}")
    Console(width=200).print(table)
    print(json.dumps([asdict(one) | {"times": one.times} for one in found]))


if __name__ == "__main__":
    main()
