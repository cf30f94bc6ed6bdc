"""Everything about plans with a device that only a device can show, in eight minutes. Not yet run on a GPU.

python -m benchmarks.gpu_check [--memory 16GiB] [--budget 480] [--folder DIR]     on this machine's GPU
python -m benchmarks.gpu_check --device cpu                                       a rehearsal of the script: tiny sizes, torch's CPU
Each part runs in a process of its own with a time limit: one that fails, hangs or breaks the device's context is reported, and the others
go on. Prints a table; the last line of stdout is one JSON document. Ends with 0 where every part passed, else 1. Needs about 20 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload.units import parse_size
from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    import torch

    from lmoffload.api.model import Model
    from lmoffload.executor.resources import Accelerator
    from lmoffload_solver.decision import Decision
    from lmoffload_solver.machine import MachineProfile
    from lmoffload_solver.plan import Plan
    from lmoffload_solver.report import RunReport

GIB = 2**30
SEARCH_S = 12.0
LATE_SHARE = 0.2
WEIGHTS_SHARE = 0.6
"""Of the weights, what the device has memory for beside 6 GiB to work with: the models are cut, and would fit otherwise."""
CLOSE_S = 3.0
"""Kept of the budget for printing."""


@dataclass(frozen=True)
class Work:
    """A model and what is asked of it."""

    shape: str
    layers: int
    num_prompts: int
    prompt_len: int
    gen_len: int
    micro_batch: int
    num_micro_batches: int


@dataclass(frozen=True)
class Sizes:
    """Of a check, or of its rehearsal."""

    small: Work
    opt: Work
    llama: Work


REAL = Sizes(
    Work("llama-1.1b", 8, 16, 64, 8, 4, 2),
    Work("opt-30b", 4, 144, 512, 8, 48, 3),  # FlexGen's batch on a T4
    Work("llama-3-70b", 3, 64, 512, 8, 32, 2),
)
REHEARSED = Sizes(
    Work("opt-125m", 2, 8, 8, 4, 2, 2),
    Work("opt-125m", 2, 6, 16, 3, 2, 3),
    Work("opt-125m", 3, 4, 16, 3, 2, 2),
)


@dataclass(frozen=True)
class Check:
    """What the parts share; each reads the profile that the first one wrote."""

    device: str
    memory_bytes: int
    folder: Path

    @property
    def rehearsed(self) -> bool:
        return self.device == "cpu"

    @property
    def sizes(self) -> Sizes:
        return REHEARSED if self.rehearsed else REAL

    @property
    def machine(self) -> MachineProfile:
        from lmoffload.profiler.store import load_profile

        return load_profile(self.folder / "machine.json")

    def accelerator(self) -> Accelerator:
        """A fresh one, its memory capped."""
        from lmoffload.executor.cuda import CudaAccelerator
        from lmoffload.executor.plain_device import PlainDevice

        return PlainDevice(self.memory_bytes) if self.rehearsed else CudaAccelerator(self.memory_bytes)

    def model(self, work: Work) -> Model:
        """Its checkpoint, random weights written when it is first asked for."""
        from lmoffload.api.model import open_model
        from lmoffload.checkpoint.dummy import make_dummy

        place = self.folder / f"{work.shape}-{work.layers}"
        return open_model(str(place if (place / "config.json").exists() else make_dummy(work.shape, place, work.layers)))


# Parts: each returns what it found, or raises.


def profiled(check: Check) -> dict[str, Any]:
    """Links, device memory, products, launches: the machine's profile."""
    from lmoffload.profiler.device import Device, measure_device
    from lmoffload.profiler.profile_machine import profile, with_device
    from lmoffload.profiler.store import load_profile, save_profile

    if check.rehearsed:
        import torch

        device = Device(torch.device("cpu"), "torch's CPU", lambda: None, check.memory_bytes, check.memory_bytes, 0)
        base = load_profile("xeon-avx512-2-cores")
        machine = with_device(base, measure_device(device, 2.0)).model_copy(update={"links": load_profile("t4-gcp").links})
    else:
        machine = profile(quick=True, disk_path=check.folder, budget_s=75.0)
    save_profile(machine, check.folder / "machine.json")
    accelerator = machine.accelerator
    assert accelerator is not None and accelerator.name != "emulated", "the profile has no device"
    links = {f"{link.direction}, {'page-locked' if link.page_locked else 'pageable'}": max(link.bytes_per_s.y) for link in machine.links}
    return {"accelerator": accelerator.model_dump(mode="json"), "links": links, "rates": [r.model_dump(mode="json") for r in machine.rates]}


def kernels(check: Check) -> dict[str, Any]:
    """The device's products and attention against the references on the host, Triton's kernels included where there is Triton."""
    import numpy as np
    import torch

    from lmoffload.kernels.decode_attention import reference_decode_attention
    from lmoffload.kernels.device_attention import device_decode_attention
    from lmoffload.kernels.device_linear import DEVICE_KERNELS, device_linear
    from lmoffload.kernels.linear import reference_linear
    from lmoffload.kernels.matrix import Matrix
    from lmoffload.kernels.triton_ready import triton_runs_on
    from lmoffload.profiler.weights import random_blocks
    from lmoffload_solver.formats import KV_LINE_BYTES, QUANTIZED, stored_bytes

    place, generator = torch.device(check.device), torch.Generator().manual_seed(0)
    errors: dict[str, float] = {}
    for name in ("bf16", "fp16", *QUANTIZED):
        size, pattern = stored_bytes((528, 1024), name), random_blocks(name)
        matrix = Matrix(pattern.repeat(-(-size // pattern.numel()))[:size], name, 528, 1024)
        x = torch.randn(20, 1024, generator=generator).to(torch.bfloat16)
        expected = reference_linear(x.float(), matrix)
        for kernel in DEVICE_KERNELS[1:] if name in QUANTIZED else DEVICE_KERNELS[:1]:
            found = device_linear(x.to(place), replace(matrix, data=matrix.data.to(place)), kernel).float().cpu()
            errors[f"{name}, {kernel}"] = float((found - expected).norm() / expected.norm())
    for name in ("bf16", *KV_LINE_BYTES):
        keys, values, lengths = _stored(name, generator)
        q, rows = torch.randn(len(lengths), 8, 64, generator=generator), np.arange(len(lengths))
        expected = reference_decode_attention(q, keys, values, rows, lengths, scaling=0.125)
        on_device = [replace(stored, data=stored.data.to(place)) for stored in (keys, values)]
        found = device_decode_attention(q.to(place), on_device[0], on_device[1], rows, lengths, scaling=0.125).cpu()
        errors[f"decode attention, {name}"] = float((found - expected).norm() / expected.norm())
    wrong = {name: error for name, error in errors.items() if not error < 0.02}
    if wrong:
        raise StatedError(f"Kernels are wrong: {wrong}.")
    return {"relative_errors": errors, "triton": triton_runs_on(place)}


def _stored(name: str, generator: torch.Generator) -> tuple[Any, Any, Any]:
    import numpy as np
    import torch

    from lmoffload.kernels.kv_rows import keys_of, row_bytes, values_of
    from lmoffload_solver.formats import KV_LINE_BYTES, LINE_ELEMENTS

    lengths = np.array([7, 100, 64])
    made = []
    for of in (keys_of, values_of):
        grouped = of is keys_of and name in KV_LINE_BYTES
        rooms = (lengths + 4) // LINE_ELEMENTS if grouped else lengths + 4
        empty = of(name, 2, 64, torch.empty(0, dtype=torch.uint8), np.zeros(1, np.int64), rooms)
        sizes = [row_bytes(empty, int(room)) for room in rooms]
        starts = np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)
        rows = of(name, 2, 64, torch.zeros(sum(sizes), dtype=torch.uint8), starts, rooms)
        for row, length in enumerate(lengths.tolist()):
            rows.store_run(row, 0, torch.randn(length, 2, 64, generator=generator))
        made.append(rows)
    return made[0], made[1], lengths


def exactness(check: Check) -> dict[str, Any]:
    """Weights, keys and values and hidden states anywhere: the tokens of resident execution."""
    return _held_to_resident(check, lambda accelerator: accelerator)


def races(check: Check) -> dict[str, Any]:
    """The same with work injected before and after copies, in the streams that copy and in the one that computes."""
    return _held_to_resident(check, lambda accelerator: Late(accelerator, check.device))


class Late:
    """An accelerator whose copies, and now and then whose computing, wait behind products that nobody asked for."""

    def __init__(self, inner: Any, device: str) -> None:
        import random

        import torch

        self._inner, self._chance = inner, random.Random(0)
        self._burden = torch.ones(1024 if device == "cpu" else 6144, 1024 if device == "cpu" else 6144, device=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._burn()
        self._inner.to_device(target, source)
        self._burn()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._burn()
        self._inner.to_host(target, source)
        self._burn()

    def computing(self) -> Any:
        self._burn()
        return self._inner.computing()

    def _burn(self) -> None:
        if self._chance.random() < LATE_SHARE:
            self._burden @ self._burden


def _held_to_resident(check: Check, change: Callable[[Any], Any]) -> dict[str, Any]:
    work = check.sizes.small
    model, machine = check.model(work), check.machine
    resident = _run(check, model, work, _plan(check, model, machine, work, _decision(model, work, "device", "device", "device")), change)[0]
    equal: dict[str, bool] = {}
    close: dict[str, float] = {}
    for homes, kv, attends, hidden, depth in PLACEMENTS:
        decision = replace(_decision(model, work, homes, kv, attends), hidden=hidden, prefetch_depth=depth)
        tokens, _ = _run(check, model, work, _plan(check, model, machine, work, decision), change)
        name = f"weights on {homes}, kv on {kv}, {attends} attends, hidden on {hidden}, {depth} ahead"
        same = sum(a == b for a, b in zip(resident, tokens, strict=True)) / len(tokens)
        if attends == "device":
            equal[name] = same == 1.0
        else:  # the host attends in fp32: more exact than the device, and now and then another of two close tokens
            close[name] = same
    different = [name for name, same in equal.items() if not same] + [name for name, share in close.items() if share < 0.5]
    if different:
        raise StatedError(f"Tokens differ from resident execution: {'; '.join(different)}. Close: {close}.")
    return {"equal": len(equal), "rows_equal_with_host_attention": close}


PLACEMENTS: tuple[tuple[Any, Any, Any, Any, int], ...] = (
    ("host", "device", "device", "device", 1),
    ("host", "host", "device", "host", 1),
    ("disk", "host", "device", "device", 2),
    ("disk", "disk", "device", "host", 3),
    ("mixed", "disk", "device", "host", 1),
    ("mixed", "host", "host", "device", 1),
)


def _decision(model: Model, work: Work, homes: Any, kv: Any, attends: Any) -> Decision:
    from lmoffload_solver.decision import Decision, KVUnit
    from lmoffload_solver.runtime import own_runtime

    shape = model.shape
    names = [tensor.name for tensor in shape.tensors if tensor.is_matrix]
    tiers = ("device", "host", "disk")
    return Decision(
        micro_batch=work.micro_batch,
        num_micro_batches=work.num_micro_batches,
        formats={},
        homes={name: tiers[i % 3] if homes == "mixed" else homes for i, name in enumerate(names)},
        kv_format="bf16",
        kv=tuple((KVUnit(kv, attends),) * work.num_micro_batches for _ in shape.layers),
        hidden="device",
        prefetch_depth=1,
        runtime=own_runtime(),
    )


def _plan(check: Check, model: Model, machine: MachineProfile, work: Work, decision: Decision) -> Plan:
    from lmoffload_solver.chain_plan import plan_of
    from lmoffload_solver.decision import Job
    from lmoffload_solver.workload import Limits

    limits = Limits(device_memory_bytes=check.memory_bytes)
    return plan_of(Job(model.shape, _workload(work)), machine, decision, digest=model.digest, limits=limits)


def _workload(work: Work) -> Any:
    from lmoffload_solver.workload import PromptGroup, Workload

    return Workload(prompts=(PromptGroup(length=work.prompt_len, count=work.num_prompts),), gen_len=work.gen_len, quality="exact")


def _run(check: Check, model: Model, work: Work, plan: Plan, change: Callable[[Any], Any] = lambda it: it) -> tuple[list[Any], RunReport]:
    from lmoffload.executor import Engine, Sampling
    from lmoffload.jobs.job import Options, synthetic_job

    job = synthetic_job(model.shape, work.num_prompts, work.prompt_len, Options(work.gen_len, Sampling(temperature=0.0), ()))
    cache = check.folder / "cache"
    with Engine(model.require_checkpoint(), plan, cache=cache, accelerators=(change(check.accelerator()),)) as engine:
        done = engine.generate(job.requests)
        report = engine.report()
    failed = [one.error for one in done if one.error]
    if failed:
        raise StatedError(f"A prompt failed: {failed[0]}")
    return [one.token_ids for one in done], report


def prediction(check: Check) -> dict[str, Any]:
    """Plans by hand: predicted against measured, and the share of the measured link that uploads reach."""
    work = replace(check.sizes.small, num_prompts=2 * check.sizes.small.num_prompts)
    model, machine = check.model(work), check.machine
    rows = []
    for homes, kv in (("host", "device"), ("host", "host"), ("device", "host"), ("mixed", "host")):
        plan = _plan(check, model, machine, work, _decision(model, work, homes, kv, "device"))
        _run(check, model, work, plan)  # libraries load and compile at first use
        rows.append({"plan": f"weights on {homes}, kv on {kv}", **_figures(plan, _run(check, model, work, plan)[1], machine)})
    errors = [abs(row["error"]) for row in rows]
    return {"median_error": statistics.median(errors), "largest_error": max(errors), "runs": rows, "memory": _memory_share(check, machine)}


def _figures(plan: Plan, report: RunReport, machine: MachineProfile) -> dict[str, Any]:
    measured, link = report.measured, [one for one in machine.links if one.direction == "upload" and one.page_locked]
    shares: dict[str, float] = {}
    for name, seconds in measured.resources.items():
        planned = plan.predicted.resources.get(name)
        if planned and seconds:
            shares[name] = planned / seconds
    return {
        "predicted_s": plan.predicted.total_s,
        "measured_s": measured.total_s,
        "error": measured.total_s / plan.predicted.total_s - 1,
        "step_s": measured.step_s,
        "predicted_step_s": plan.predicted.step_s,
        "tokens_per_s": measured.tokens_per_s,
        "predicted_share_of_busy": shares,  # of "upload": bytes at the measured link's rate over its busy seconds
        "link_bytes_per_s": max(link[0].bytes_per_s.y) if link else None,
        "overlapped_s": report.overlapped_s,
        "control_s": report.control_s,
        "peak_bytes": {tier: int(size) for tier, size in measured.peak_bytes.items()},
        "predicted_peak_bytes": {tier: int(size) for tier, size in plan.predicted.peak_bytes.items()},
    }


def _memory_share(check: Check, machine: MachineProfile) -> dict[str, float]:
    """Bytes of weights a second in a decode-sized product, as a share of reading the device's memory."""
    import torch

    from lmoffload.profiler.cuda_device import cuda_device
    from lmoffload.profiler.device import Device, product_seconds

    rehearsing = Device(torch.device("cpu"), "torch's CPU", lambda: None, check.memory_bytes, check.memory_bytes, 0)
    device, side = (rehearsing, 256) if check.rehearsed else (cuda_device(), 8192)
    assert device is not None and machine.accelerator is not None and machine.accelerator.name != "emulated"
    seconds = product_seconds(device, side, (16,), 0.5)[16].median_s
    rate, reading = 2 * side * side / seconds, next(r.bytes_per_s for r in machine.memory if r.tier == "device")
    return {"product_bytes_per_s": rate, "share_of_reading": rate / reading}


def opt_30b(check: Check) -> dict[str, Any]:
    """Layers of OPT-30B's shape."""
    return _searched(check, check.sizes.opt)


def llama_70b(check: Check) -> dict[str, Any]:
    """Layers of Llama-3-70B's shape."""
    return _searched(check, check.sizes.llama)


def _searched(check: Check, work: Work) -> dict[str, Any]:
    """The planner's own plan at a given batch, the device too small for all that the model is cut to."""
    from lmoffload_solver.chain_plan import plan_of
    from lmoffload_solver.chain_search import ChainSearch
    from lmoffload_solver.counting import weights_bytes
    from lmoffload_solver.decision import Job
    from lmoffload_solver.workload import Limits

    model, machine = check.model(work), check.machine
    room = (GIB if check.rehearsed else 6 * GIB) + int(WEIGHTS_SHARE * weights_bytes(model.shape))
    capped = replace(check, memory_bytes=min(check.memory_bytes, room))
    job = Job(model.shape, _workload(work))
    limits = Limits(device_memory_bytes=capped.memory_bytes, micro_batch=work.micro_batch, num_micro_batches=work.num_micro_batches)
    found = ChainSearch(job, machine, machine.disks[0], limits, "exact", time.perf_counter() + SEARCH_S).run()
    if found is None:
        raise StatedError(f"No plan was found for {work} with {capped.memory_bytes} bytes of device memory.")
    plan = plan_of(job, machine, found.decision, digest=model.digest, limits=limits)
    _, report = _run(capped, model, work, plan)
    homes = sorted({tier for _, _, tier in plan.kv.homes})
    choices = {"weights": {tier: int(size) for tier, size in plan.weights.bytes.items()}, "kv_homes": homes}
    more = {"host_share": plan.attention.host_share, "hidden": plan.hidden.tier, "device_memory_bytes": capped.memory_bytes}
    return {**_figures(plan, report, machine), **choices, **more}


PARTS: Mapping[str, tuple[Callable[[Check], dict[str, Any]], float]] = {
    "profile": (profiled, 110.0),
    "kernels": (kernels, 50.0),
    "exactness": (exactness, 80.0),
    "races": (races, 80.0),
    "prediction": (prediction, 80.0),
    "opt-30b": (opt_30b, 100.0),
    "llama-3-70b": (llama_70b, 110.0),
}
"""Each with the seconds that it may take at most; what is left of the budget bounds it as well."""


def run_part(check: Check, name: str) -> dict[str, Any]:
    """In this process; what failed is told, not raised."""
    begin = time.perf_counter()
    try:
        found, outcome = PARTS[name][0](check), "passed"
    except Exception as error:
        found, outcome = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}, "failed"
    return {"part": name, "outcome": outcome, "seconds": time.perf_counter() - begin, **found}


def start_part(check: Check, name: str, limit_s: float) -> dict[str, Any]:
    """In a process of its own, which is ended when its time is over."""
    options = ["--device", check.device, "--memory", str(check.memory_bytes), "--folder", str(check.folder), "--part", name]
    command, begin = [sys.executable, "-m", "benchmarks.gpu_check", *options], time.perf_counter()
    told = {"part": name, "outcome": "failed"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {**told, "seconds": time.perf_counter() - begin, "error": f"not done after {limit_s:.0f} s"}
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return {**told, "seconds": time.perf_counter() - begin, "error": f"ended with {done.returncode}: {done.stderr[-800:]}"}


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """A line for each part."""
    table = Table("part", "outcome", "s", "found")
    left_out = {"part", "outcome", "seconds", "trace", "rates"}
    for row in rows:
        found = "; ".join(f"{name} {_short(value)}" for name, value in row.items() if name not in left_out)
        table.add_row(row["part"], row["outcome"], f"{row['seconds']:.1f}", found)
    console.print(table)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(map(_short, value)) + "]" if isinstance(value, list) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--memory", default="16GiB", help="of the device, at most")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all")
    parser.add_argument("--folder", type=Path, help="for checkpoints and the profile; by default a temporary one, which is removed")
    parser.add_argument("--only", help="parts, separated by commas; profile is always run")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    prepare_threads()
    prepare_allocator()
    if options.part is not None:
        print(json.dumps(run_part(Check(options.device, int(options.memory), options.folder), options.part)))
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here that torch can use: run this where there is one, or rehearse it with --device cpu.", file=sys.stderr)
        return 1
    begin, names = time.perf_counter(), list(PARTS) if options.only is None else ["profile", *options.only.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = temporary if options.folder is None else options.folder
        Path(folder).mkdir(parents=True, exist_ok=True)
        check, rows = Check(options.device, parse_size(options.memory), Path(folder).absolute()), []
        for name in names:
            left_s = options.budget - CLOSE_S - (time.perf_counter() - begin)
            print(f"{name}: at most {max(0.0, min(PARTS[name][1], left_s)):.0f} s", file=sys.stderr)
            if left_s < 1:
                rows.append({"part": name, "outcome": "not begun", "seconds": 0.0})
            else:
                rows.append(start_part(check, name, min(PARTS[name][1], left_s)))
    show(Console(width=220), rows)
    document = {"device": options.device, "torch": torch.__version__, "seconds": time.perf_counter() - begin, "parts": rows}
    print(json.dumps(document))
    return 0 if all(row["outcome"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
