"""Another system's policy for a job, priced by this simulator with that system's traits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lmoffload_solver import counting
from lmoffload_solver.accelerator import Accelerator, EmulatedDevice
from lmoffload_solver.chain_domain import grid
from lmoffload_solver.chain_plan import Remarks, plan_of
from lmoffload_solver.chain_predict import costs_of, simulate_chain
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.device_memory import ChainMemory, memory_of
from lmoffload_solver.errors import InfeasibleError, StatedError
from lmoffload_solver.formats import QUALITY_BITS
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, PolicyFigures
from lmoffload_solver.policies.accelerate import accelerate_decision
from lmoffload_solver.policies.flexgen_constants import FlexgenConstants, published_constants
from lmoffload_solver.policies.flexgen_model import PolicyRow, dimensions_of, predict
from lmoffload_solver.policies.flexgen_policy import flexgen_decision
from lmoffload_solver.policies.flexgen_search import search as flexgen_search
from lmoffload_solver.policies.on_emulated import emulated_decision
from lmoffload_solver.policies.on_host import price_on_host
from lmoffload_solver.policies.zero_inference import zero_decision
from lmoffload_solver.value import Tier
from lmoffload_solver.workload import Limits, Workload

Policy = Literal["accelerate", "zero-inference", "flexgen"]

FLEXGEN_MACHINE = "t4-gcp"
"""The machine whose constants FlexGen ships."""

DECODE_SHARE = 4.3 / 21.24
"""Rate of products in decode over that in prefill, by FlexGen's constants."""


def price_policy(
    policy: Policy,
    model: ModelShape,
    machine: MachineProfile,
    workload: Workload,
    limits: Limits,
    *,
    file_system: str | None = None,
    digest: str | None = None,
) -> Plan:
    """The plan that a system would choose for a job; its batch is the best of a sweep where the system leaves it to the user.

    Raises:
        InfeasibleError: none of its batches fits.
        StatedError: the system needs a device that the machine has not, or one alone, or does not run such a model.
    """
    if machine.accelerator is not None and machine.accelerator.count > 1:
        raise StatedError(f"The policy {policy} is priced for one device, and {machine.name!r} has {machine.accelerator.count}.")
    if machine.accelerator is None:
        return price_on_host(policy, model, machine, workload, limits, file_system=file_system, digest=digest)
    job = Job(model, workload)
    figures = None
    if isinstance(machine.accelerator, EmulatedDevice):
        decision = emulated_decision(policy, job, machine, limits, file_system)
    elif policy == "flexgen":
        row = _flexgen_row(job, machine, limits)
        decision, figures = flexgen_decision(model, row), own_figures(job, machine, row)
    else:
        decision = _best_of_sweep(policy, job, machine, limits, file_system)
    remarks = Remarks(policy=policy, predicted_by_policy=figures)
    digest = digest or model.fingerprint()
    return plan_of(job, machine, decision, digest=digest, limits=limits, remarks=remarks, file_system=file_system)


def price_row(
    row: PolicyRow,
    model: ModelShape,
    machine: MachineProfile,
    workload: Workload,
    limits: Limits,
    *,
    file_system: str | None = None,
    digest: str | None = None,
) -> Plan:
    """The plan that a given FlexGen policy is, whether or not it fits by our count of memory.

    Raises:
        StatedError: the machine has no device, or the row cannot be priced.
    """
    _require_device(machine, "flexgen")
    if isinstance(machine.accelerator, EmulatedDevice):
        raise StatedError("A policy file is for a machine with a device of its own: name one with --machine, without --emulate-device.")
    job, decision = Job(model, workload), flexgen_decision(model, row)
    over = [
        f"By our count the policy needs {peak} bytes of {tier}, which has {capacity}."
        for memory in (memory_of(job, machine, limits),)
        for tier, peak in memory.peaks(decision).items()
        if peak > (capacity := memory.capacity[tier])
    ]
    remarks = Remarks(policy="flexgen", predicted_by_policy=own_figures(job, machine, row), sentences=tuple(over))
    digest = digest or model.fingerprint()
    return plan_of(job, machine, decision, digest=digest, limits=limits, remarks=remarks, file_system=file_system)


def own_figures(job: Job, machine: MachineProfile, row: PolicyRow) -> PolicyFigures | None:
    """What FlexGen's own model predicts for a policy on the whole job; None for a model that it counts wrong."""
    try:
        dims = dimensions_of(job.model)
    except StatedError:
        return None
    prediction = predict(dims, round(job.mean_length), job.gen_len, row, constants_of(machine))
    blocks = job.num_prompts / (row.micro_batch * row.num_micro_batches)
    return PolicyFigures(
        tokens_per_s=prediction.tokens_per_s, prefill_s=prediction.prefill_s * blocks, decode_s=prediction.decode_s * blocks
    )


def constants_of(machine: MachineProfile) -> FlexgenConstants:
    """FlexGen's constants for a machine: those that it ships for its own; for another what its fit would find there."""
    shipped = published_constants()
    if machine.name == FLEXGEN_MACHINE:
        return shipped
    assert isinstance(machine.accelerator, Accelerator)
    links = {(link.direction, link.page_locked): max(link.bytes_per_s.y) for link in machine.links}
    rates = {(rate.work, rate.tier): rate.per_s for rate in machine.rates if rate.way == "eager"}
    products = max(machine.accelerator.products.flops_per_s)
    disk = machine.disks[0]
    read = max(max(curve.bytes_per_s.y) for curve in disk.read)
    write = max((max(curve.bytes_per_s.y) for curve in disk.write), default=read)
    return shipped.model_copy(
        update={
            "ctog_bytes_per_s": links["upload", True],
            "gtoc_cache_bytes_per_s": links["download", False],
            "gtoc_hidden_bytes_per_s": links["download", True],
            "dtoc_bytes_per_s": read,
            "ctod_cache_prefill_bytes_per_s": write,
            "ctod_hidden_prefill_bytes_per_s": write,
            "ctod_decode_bytes_per_s": write,
            "mm_prefill_flops_per_s": products,
            "mm_decode_flops_per_s": DECODE_SHARE * products,
            "bmm_prefill_flops_per_s": rates["attention_prefill", "device"],
            "bmm_decode_flops_per_s": rates["attention_decode", "device"],
            "cpu_flops_per_s": rates["attention_decode", "host"],
            "gpu_bytes": machine.accelerator.memory_bytes,
            "cpu_bytes": machine.host.memory_usable_bytes,
            "disk_bytes": disk.free_bytes,
        }
    )


def read_rows(path: Path, model: ModelShape, workload: Workload) -> PolicyRow:
    """The policy of a file for a model and a job: its only row, or of several the one of that model and prompt length, quantized where the
    quality class allows it.

    Raises:
        StatedError: the file cannot be read, or has no such row.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StatedError(f"The policy file {path} cannot be read as JSON: {error}.") from error
    rows = list(_rows_in(document))
    chosen = rows if len(rows) == 1 else [row for row in rows if _is_for(row, model, workload)]
    if len(chosen) > 1:
        lossy = QUALITY_BITS[workload.quality] < 8
        chosen = [row for row in chosen if (bool(row.get("weights_4bit")) or bool(row.get("kv_4bit"))) == lossy] or chosen
    if not chosen:
        wanted = f"{model.name} with prompts of {workload.max_prompt_len} tokens"
        raise StatedError(f"The policy file {path} has no row for {wanted}; add one with its model and prompt.")
    try:
        return PolicyRow.model_validate({key: value for key, value in chosen[0].items() if key not in ("model", "prompt")})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "a row"
        raise StatedError(f"The policy file {path} is not valid: {place}: {str(first['msg']).rstrip('.')}.") from error


def _rows_in(document: Any) -> Iterator[dict[str, Any]]:
    """The rows of a row, a list of rows, an object with `rows`, or one with `policies`."""
    if isinstance(document, list):
        yield from (row for row in document if isinstance(row, dict))
    elif isinstance(document, dict):
        inner = document.get("policies", document.get("rows"))
        if inner is None:
            yield document
        else:
            yield from _rows_in(inner)


def _is_for(row: dict[str, Any], model: ModelShape, workload: Workload) -> bool:
    names = row.get("model", model.name) == model.name
    return bool(names and row.get("prompt", workload.max_prompt_len) == workload.max_prompt_len)


def _flexgen_row(job: Job, machine: MachineProfile, limits: Limits) -> PolicyRow:
    constants = constants_of(machine)
    memory = memory_of(job, machine, limits)
    granted = {
        "gpu_bytes": min(constants.gpu_bytes, memory.capacity["device"]),
        "cpu_bytes": min(constants.cpu_bytes, memory.capacity["host"]),
    }
    lossy = QUALITY_BITS[job.workload.quality] < 8
    dims = dimensions_of(job.model)
    found = flexgen_search(dims, job.longest, job.gen_len, constants.model_copy(update=granted), weights_4bit=lossy)
    return found.row


def _best_of_sweep(policy: Policy, job: Job, machine: MachineProfile, limits: Limits, file_system: str | None) -> Decision:
    memory = memory_of(job, machine, limits)
    make = _accelerate_for if policy == "accelerate" else _zero_for
    sizes = grid(job.num_prompts, job.num_prompts) if limits.micro_batch is None else (min(limits.micro_batch, job.num_prompts),)
    priced: list[tuple[float, int, Decision]] = []
    for size in sizes:
        for decision in make(job, memory, size):
            if memory.fits(decision):
                priced.append((simulate_chain(job, costs_of(machine, decision, file_system), decision).total_s, len(priced), decision))
    if not priced:
        raise InfeasibleError(f"The policy of {policy} fits no batch of this work on {machine.name}; give it more --device-memory.")
    return min(priced, key=lambda entry: entry[:2])[2]


def _accelerate_for(job: Job, memory: ChainMemory, batch: int) -> Iterator[Decision]:
    bare = accelerate_decision(job.model, batch, 0, 0)
    parts = memory.parts(bare)
    taken = {tier: sum(size for name, size in parts[tier].items() if not name.startswith("weight")) for tier in parts}
    device, host = memory.capacity["device"] - taken["device"], memory.capacity["host"] - taken["host"]
    yield accelerate_decision(job.model, batch, max(0, device), max(0, host))


def _zero_for(job: Job, memory: ChainMemory, batch: int) -> Iterator[Decision]:
    lossy = QUALITY_BITS[job.workload.quality] < 8
    size = counting.weights_bytes(job.model) * (0.3 if lossy else 1.0)
    tier: Tier = "host" if size < 0.9 * memory.capacity["host"] else "disk"
    for offload in (False, True):
        yield zero_decision(job.model, batch, tier, weights_4bit=lossy, kv_offload=offload)


def _require_device(machine: MachineProfile, policy: str) -> None:
    if machine.accelerator is None:
        raise StatedError(f"The policy of {policy} needs a machine with a device, and {machine.name} has none; name one with --machine.")
