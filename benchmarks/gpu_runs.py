"""What the parts of `gpu_check` share: models, plans by hand, runs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmoffload_solver.errors import StatedError

if TYPE_CHECKING:
    from lmoffload.api.model import Model
    from lmoffload.executor.resources import Accelerator
    from lmoffload_solver.decision import Decision
    from lmoffload_solver.machine import MachineProfile
    from lmoffload_solver.plan import Plan
    from lmoffload_solver.report import RunReport


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


def decision_of_work(model: Model, work: Work, homes: Any, kv: Any, attends: Any) -> Decision:
    """Every weight on `homes` ("mixed": spread over the tiers), all keys and values on `kv`."""
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


def plan_of_work(check: Check, model: Model, machine: MachineProfile, work: Work, decision: Decision) -> Plan:
    from lmoffload_solver.chain_plan import plan_of
    from lmoffload_solver.decision import Job
    from lmoffload_solver.workload import Limits

    limits = Limits(device_memory_bytes=check.memory_bytes)
    return plan_of(Job(model.shape, workload_of(work)), machine, decision, digest=model.digest, limits=limits)


def workload_of(work: Work) -> Any:
    from lmoffload_solver.workload import PromptGroup, Workload

    return Workload(prompts=(PromptGroup(length=work.prompt_len, count=work.num_prompts),), gen_len=work.gen_len, quality="exact")


def run_work(
    check: Check, model: Model, work: Work, plan: Plan, change: Callable[[Any], Any] = lambda it: it
) -> tuple[list[Any], RunReport]:
    """Tokens of every prompt, and the report. change: of the accelerator, before it is used."""
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
