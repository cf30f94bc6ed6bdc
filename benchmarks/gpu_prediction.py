"""Parts of `gpu_check`: what plans predict against their runs, by hand on a small model and searched on layers of large ones."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_runs import Check, Work, decision_of_work, plan_of_work, run_work, workload_of
from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    from lmoffload_solver.machine import MachineProfile
    from lmoffload_solver.plan import Plan
    from lmoffload_solver.report import RunReport

GIB = 2**30
SEARCH_S = 12.0
WEIGHTS_SHARE = 0.6
"""Of the weights, what the device has memory for beside 6 GiB to work with: the models are cut, and would fit otherwise."""


def prediction(check: Check) -> dict[str, Any]:
    """Plans by hand: predicted against measured, and the share of the measured link that uploads reach."""
    work = replace(check.sizes.small, num_prompts=2 * check.sizes.small.num_prompts)
    model, machine = check.model(work), check.machine
    rows = []
    for homes, kv in (("host", "device"), ("host", "host"), ("device", "host"), ("mixed", "host")):
        plan = plan_of_work(check, model, machine, work, decision_of_work(model, work, homes, kv, "device"))
        run_work(check, model, work, plan)  # libraries load and compile at first use
        rows.append({"plan": f"weights on {homes}, kv on {kv}", **_figures(plan, run_work(check, model, work, plan)[1], machine)})
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
    job = Job(model.shape, workload_of(work))
    limits = Limits(device_memory_bytes=capped.memory_bytes, micro_batch=work.micro_batch, num_micro_batches=work.num_micro_batches)
    found = ChainSearch(job, machine, machine.disks[0], limits, "exact", time.perf_counter() + SEARCH_S).run()
    if found is None:
        raise StatedError(f"No plan was found for {work} with {capped.memory_bytes} bytes of device memory.")
    plan = plan_of(job, machine, found.decision, digest=model.digest, limits=limits)
    _, report = run_work(capped, model, work, plan)
    homes = sorted({tier for _, _, tier in plan.kv.homes})
    choices = {"weights": {tier: int(size) for tier, size in plan.weights.bytes.items()}, "kv_homes": homes}
    more = {"host_share": plan.attention.host_share, "hidden": plan.hidden.tier, "device_memory_bytes": capped.memory_bytes}
    return {**_figures(plan, report, machine), **choices, **more}
