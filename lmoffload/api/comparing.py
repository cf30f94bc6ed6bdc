"""`compare`: this engine and its peers on the same work, under the same limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lmoffload.api.contestants import Given, named_values
from lmoffload.api.limits import cores_of
from lmoffload.api.machine import Machine, machine_of
from lmoffload.api.model import Model, open_model
from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.api.work import Work
from lmoffload.bench.contest import CHECK_PROMPTS, CHECK_TOKENS, Contest
from lmoffload.bench.control_groups import ControlGroups, NoGroupsError
from lmoffload.bench.peer import Conditions
from lmoffload.bench.peers import NAMES, names_of
from lmoffload.bench.work import Work as Asked
from lmoffload.errors import UsageError
from lmoffload.profiler.limits import read_limits
from lmoffload.profiler.processor import versions
from lmoffload.profiler.progress import Progress
from lmoffload.settings import Settings
from lmoffload.units import format_bytes, format_rate, parse_duration, parse_size
from lmoffload_solver.accelerator import EmulatedDevice
from lmoffload_solver.comparison import Comparison, Granted, System
from lmoffload_solver.counting import kv_bytes, weights_bytes
from lmoffload_solver.machine import Curve, MachineProfile
from lmoffload_solver.plan import Named
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits, Workload

HIDDEN_ELEMENT_BYTES = 2
"""FlexGen counts hidden states and its cache in 16 bits."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What a comparison is to be, as people write it."""

    against: str
    quality: Quality = "exact"
    host_memory: str | None = None
    disk_rate: str | None = None
    cores: str | None = None
    peer_python: tuple[str, ...] = ()
    peer_memory: tuple[str, ...] = ()
    rounds: int = 3
    sweep: bool = True
    cut: int | None = None
    check_projection: bool = False
    warm: bool = False
    keep_cache: bool = False
    timeout: str = "1h"
    machine: str | None = None
    command: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises:
        UsageError: a value has no meaning.
        """
        names_of(self.against)
        parse_duration(self.timeout)
        if self.rounds < 1:
            raise UsageError(f"The number given for rounds is {self.rounds}; it must be at least 1.")
        if self.cut is not None and self.cut < 2:
            raise UsageError(f"The number given for cut-gen-len is {self.cut}; it must be at least 2, so that there is a step to project.")
        if self.check_projection and self.cut is None:
            raise UsageError("--check-projection holds a projection against the whole run: give --cut-gen-len too.")
        for option, texts, known in (("peer-python", self.peer_python, (*NAMES, "")), ("peer-memory", self.peer_memory, NAMES)):
            for name in named_values(texts, option):
                if name not in known:
                    raise UsageError(f"--{option} names no peer in {name!r}; write it as NAME=VALUE, NAME one of {', '.join(NAMES)}.")


def compare(
    name: str | Path,
    work: Work,
    limits: Limits,
    options: CompareOptions,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    tell: Tell = tell_on_stderr,
) -> Comparison:
    """Measure this engine and its peers.

    Args:
        limits: the planner's, but memory, which is everybody's and stands in `options`.

    Raises:
        UsageError: an option has no meaning.
        StatedError: the model or the work cannot be read.
    """
    options.check()
    work.check()
    work.require_prompts()
    model = open_model(name)
    checkpoint = model.require_checkpoint()
    remarks: list[str] = []
    granted = _granted(options, limits, checkpoint.path, remarks)
    for remark in remarks:
        tell(remark)
    limits = limits.model_copy(update={"host_memory_bytes": None if options.host_memory is None else parse_size(options.host_memory)})
    if granted.cores and limits.threads is None:
        limits = limits.model_copy(update={"threads": len(granted.cores)})
    machine = machine_of(options.machine, checkpoint.path, on_progress=on_progress, tell=tell)
    if granted.read_bytes_per_s is not None and granted.enforced:
        machine = replace(machine, profile=with_disk_rate(machine.profile, granted.read_bytes_per_s))
    folder = Settings.of_user().cache_directory / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    asked = _asked(work, model, repeats=2 if options.warm else 1)
    given = _given(model, machine, asked, options, limits, granted, folder, tell)
    reference = asked.first(CHECK_PROMPTS, CHECK_TOKENS)
    contest = Contest(
        asked,
        Conditions(granted, folder, parse_duration(options.timeout), not options.keep_cache),
        options.rounds, options.cut, options.check_projection, options.sweep,
        given.reference(Workload.of_lengths([len(prompt) for prompt in reference.prompts], reference.gen_len)),
        tell,
    )  # fmt: skip
    return _told(given, options, granted, contest.run(given.peers(names_of(options.against))), tuple(remarks))


def _told(given: Given, options: CompareOptions, granted: Granted, systems: tuple[System, ...], remarks: tuple[str, ...]) -> Comparison:
    """What was found, with all that is needed to read and repeat it."""
    workload, shape, profile = given.workload, given.model.shape, given.machine.profile
    device = given.limits.emulated_device
    return Comparison(
        model=Named(name=shape.name, digest=given.model.digest, place=given.model.place),
        model_bytes=weights_bytes(shape),
        kv_bytes=sum(g.count * kv_bytes(shape, g.length + workload.gen_len, "bf16", "bf16") for g in workload.prompts),
        hidden_bytes=HIDDEN_ELEMENT_BYTES * shape.hidden_size * (workload.prompt_tokens + workload.num_prompts * workload.gen_len),
        machine=profile.name,
        host=read_limits(),
        processor=profile.processors[0].name,
        versions=versions(),
        made_at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        command=options.command,
        workload=workload,
        quality=options.quality,
        granted=granted,
        emulated_device=None if device is None else _device_words(device),
        rounds=options.rounds,
        warm=options.warm,
        cold=not options.keep_cache,
        measured_tokens=min(options.cut or workload.gen_len, workload.gen_len),
        systems=systems,
        remarks=remarks,
    )


def _device_words(device: EmulatedDevice) -> str:
    return f"{format_bytes(device.memory_bytes)} at {format_rate(device.bytes_per_s, 'B')} each way"


def _given(
    model: Model, machine: Machine, asked: Asked, options: CompareOptions, limits: Limits, granted: Granted, folder: Path, tell: Tell
) -> Given:
    workload = Workload.of_lengths([len(prompt) for prompt in asked.prompts], asked.gen_len, options.quality)
    pythons = {peer: Path(path) for peer, path in named_values(options.peer_python, "peer-python").items()}
    memories = {peer: parse_size(size) for peer, size in named_values(options.peer_memory, "peer-memory").items()}
    cores = len(granted.cores) or read_limits().cores
    return Given(model, machine, workload, options.quality, limits, cores, granted.memory_bytes, folder, pythons, memories, tell)


def _granted(options: CompareOptions, limits: Limits, path: Path, remarks: list[str]) -> Granted:
    """The limits, and whether the kernel can be made to enforce them; where not, a remark says so and nothing is limited."""
    memory = None if options.host_memory is None else parse_size(options.host_memory)
    if memory is not None and limits.emulated_device is not None:
        memory += limits.emulated_device.memory_bytes  # it lies in the memory of the process
    rate = None if options.disk_rate is None else parse_size(options.disk_rate.removesuffix("/s"))
    asked = Granted(memory_bytes=memory, read_bytes_per_s=rate, cores=() if options.cores is None else cores_of(options.cores))
    try:
        with ControlGroups.open(asked, [path]):
            pass
        enforced = True
    except NoGroupsError as error:
        enforced = False
        remarks.append(f"{error}: the comparison goes on without limits; run it as root, with control groups mounted, to have them.")
    if not (options.keep_cache or os.access("/proc/sys/vm/drop_caches", os.W_OK)):
        remarks.append("The page cache cannot be emptied without root: the kernel is asked to let go of the model's files before each run.")
    return asked.model_copy(update={"enforced": enforced})


def with_disk_rate(profile: MachineProfile, bytes_per_s: int) -> MachineProfile:
    """The profile with every disk read at most at a rate, so that plans are made for the disk as it is limited."""

    def limited(curve: Curve) -> Curve:
        fit = None if curve.fit is None else curve.fit.model_copy(update={"rate_per_s": min(curve.fit.rate_per_s, bytes_per_s)})
        return curve.model_copy(update={"y": tuple(min(rate, float(bytes_per_s)) for rate in curve.y), "fit": fit})

    disks = tuple(
        disk.model_copy(
            update={"read": tuple(one.model_copy(update={"bytes_per_s": limited(one.bytes_per_s)}) for one in disk.read)}
        )
        for disk in profile.disks
    )
    return profile.model_copy(update={"disks": disks})


def _asked(work: Work, model: Model, repeats: int) -> Asked:
    """The prompts' tokens, all continued by the same number of tokens."""
    if work.input_file is None and work.prompt is None:
        from lmoffload.jobs.job import Options, synthetic_job

        group = (workload := work.workload(model)).prompts[0]
        job = synthetic_job(model.shape, group.count, group.length, Options(workload.gen_len))
    else:
        from lmoffload.jobs.text import Text

        job = work.job(Text(model.require_checkpoint()), model.shape)
        job.require_sound()
    gen_len = max(request.max_new_tokens for request in job.requests)
    return Asked(prompts=tuple(request.token_ids for request in job.requests), gen_len=gen_len, repeats=repeats)
