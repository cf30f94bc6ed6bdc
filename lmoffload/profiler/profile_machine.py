"""A machine's profile, measured within a time budget."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.profiler.apart import started
from lmoffload.profiler.cuda_device import cuda_device
from lmoffload.profiler.limits import read_limits
from lmoffload.profiler.processor import host_processor, versions
from lmoffload.profiler.progress import Clock, Progress
from lmoffload.profiler.samples import UNSTEADY
from lmoffload_solver.accelerator import Rate
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import FORMATS, QUANTIZED
from lmoffload_solver.machine import AttentionCurve, HostLimits, LinearCurve, MachineProfile, MemoryRate, Processor

if TYPE_CHECKING:
    from lmoffload.kernels.pool import Pool
    from lmoffload.profiler.device import Device, DeviceFigures

QUICK_S, FULL_S = 48.0, 275.0
"""Seconds in all, loading the libraries included; a little is left for what overruns."""
SHARES = {
    "base": (9.0, 9.0),
    "disk": (8.0, 50.0),
    "memory": (3.0, 6.0),
    "copies": (2.4, 6.0),
    "links": (0.5, 10.0),
    "device": (6.0, 20.0),
    "linear": (15.0, 135.0),
    "conversion": (1.0, 4.0),
    "attention": (5.0, 30.0),
    "quantize": (0.2, 1.0),
    "overheads": (12.0, 24.0),
    "contention": (2.0, 12.0),
    "default threads": (3.5, 6.0),
}
"""Seconds of each stage, quick and full, when there is no more and no less than QUICK_S or FULL_S in all."""
ATTENDED = "bf16"
"""Format of keys and values that a device leaves to the host."""
CHILD_TIMEOUT_S = 90.0
ROOM_FOR_TWO_BYTES = 2 << 30
"""From here on this process loads and compiles while the other one does."""


def profile(
    *,
    quick: bool,
    disk_path: Path,
    on_progress: Callable[[Progress], None] | None = None,
    formats: Sequence[str] | None = None,
    budget_s: float | None = None,
) -> MachineProfile:
    """Measure this machine and the disk that holds `disk_path`.

    Args:
        quick: fewer points in less time: within 60 s instead of within 5 minutes.
        on_progress: hears what is measured now.
        formats: stored formats whose linear layers are measured; all by default.
        budget_s: seconds instead of the default ones; every point is measured at least three times however small it is.

    Raises:
        StatedError: the disk cannot be measured, or the process that measures the base failed.
    """
    shares = {stage: seconds[0 if quick else 1] for stage, seconds in SHARES.items()}
    clock = Clock((QUICK_S if quick else FULL_S) if budget_s is None else budget_s, shares, on_progress)
    limits = read_limits()
    clock.start("base")
    # In its own process, and first: this one does not hold the libraries yet, and both must fit under a limit.
    with started("base", CHILD_TIMEOUT_S) as answer:
        if limits.memory_usable_bytes >= ROOM_FOR_TWO_BYTES:
            _load(measured_formats(formats, quick))
        base_bytes = int(answer(lambda told: None)["bytes"])
    device = cuda_device()
    if device is None:
        clock.skip("device")
    with _serial_torch():
        from lmoffload.kernels.pool import Pool

        with ExitStack() as stack:
            pools = [stack.enter_context(Pool(threads)) for threads in thread_counts(limits.cores, quick=quick)]
            unnamed = _measure(clock, pools, quick, disk_path, formats, limits, base_bytes, device)
    clock.end()
    found = unnamed.versions
    day, version, kind = datetime.date.today().isoformat(), found.get("lmoffload", "(unknown version)"), "quick" if quick else "full"
    return unnamed.model_copy(update={"provenance": f"measured {day} by lmoffload {version} ({kind})"})


def thread_counts(cores: int, *, quick: bool) -> tuple[int, ...]:
    """Numbers of threads to measure with, ascending: one, all cores, and between them half of them (quick) or the powers of two."""
    between = {cores // 2} if quick else {1 << i for i in range(cores.bit_length())}
    return tuple(sorted(n for n in {1, cores, *between} if 1 <= n <= cores))


QUICK_FORMATS = ("fp32", "bf16", "fp16", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k", *QUANTIZED)
"""Formats of most files; the full profile has all of them."""


def measured_formats(formats: Sequence[str] | None, quick: bool) -> tuple[str, ...]:
    """The formats asked for, or all that this kind of profile has."""
    if formats is not None:
        return tuple(formats)
    return QUICK_FORMATS if quick else (*FORMATS, *QUANTIZED)


def _load(formats: Sequence[str]) -> None:
    """What would otherwise be loaded and compiled while something waits to be measured."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from lmoffload.profiler.attention import compile_attention
    from lmoffload.profiler.linear import compile_kernels

    compile_kernels(formats)
    compile_attention()


def _measure(
    clock: Clock,
    pools: Sequence[Pool],
    quick: bool,
    disk_path: Path,
    formats: Sequence[str] | None,
    limits: HostLimits,
    base_bytes: int,
    device: Device | None,
) -> MachineProfile:
    """Every stage in turn; each imports what it needs, since importing this module must load neither torch nor transformers."""
    from lmoffload.profiler.attention import attention_curves, quantize_rates
    from lmoffload.profiler.contention import measure_contention
    from lmoffload.profiler.conversion import conversion_rates
    from lmoffload.profiler.copies import copy_contention, copy_rates
    from lmoffload.profiler.cuda_links import link_curves
    from lmoffload.profiler.device import measure_device
    from lmoffload.profiler.disk import read_disk
    from lmoffload.profiler.linear import linear_curves
    from lmoffload.profiler.memory import memory_rates
    from lmoffload.profiler.overheads import measure_overheads
    from lmoffload_solver.threads import disk_threads

    tell = clock.tell
    readings = read_disk(disk_path, budget_s=clock.start("disk"), quick=quick, tell=tell)
    memory = memory_rates(pools, clock.start("memory"))
    share_s = clock.start("copies") / 3
    copies = copy_rates(pools, share_s)
    copying = copy_contention(pools[-1], copies[0].bytes_per_s, 2 * share_s)
    links, link_remarks = link_curves(clock.start("links"), tell)
    figures = None if device is None else measure_device(device, clock.start("device"), tell)
    linear, linear_remarks = linear_curves(pools, clock.start("linear"), quick=quick, formats=measured_formats(formats, quick), tell=tell)
    rates = conversion_rates(pools[-1], tuple(QUANTIZED), clock.start("conversion"), tell)
    attention = attention_curves(pools, clock.start("attention"), quick=quick, tell=tell)
    rates += quantize_rates(pools[-1], clock.start("quantize"))
    overheads = measure_overheads(pools, clock.start("overheads"), readings.random_read_s, quick=quick, tell=tell)
    contention = measure_contention(disk_path, pools[-1], clock.start("contention"), disk_threads(readings.disk), tell)
    slowdown, thread_remarks = _default_threads(pools[-1], clock.start("default threads"))
    steady_remarks = _unsteady_remarks(memory, linear, attention)
    measured = MachineProfile(
        name=platform.node() or "this machine",
        provenance="",
        host=limits,
        processors=(host_processor(limits.cores),),
        memory=memory,
        copies=copies,
        disks=(readings.disk,),
        links=links,
        linear=linear,
        attention=attention,
        overheads=overheads,
        contention=(*contention, *copying),
        rates=rates,
        base_bytes=base_bytes,
        versions=versions(),
        remarks=(*readings.remarks, *link_remarks, *linear_remarks, *steady_remarks, *thread_remarks),
        default_threads_slowdown=slowdown,
    )
    return measured if figures is None else with_device(measured, figures)


def with_device(profile: MachineProfile, figures: DeviceFigures) -> MachineProfile:
    """The profile with a device, and with the host's rate of attention over 16-bit keys and values, which plans with a device ask for."""
    decode = [max(curve.rate.y) for curve in profile.attention if (curve.phase, curve.format) == ("decode", ATTENDED)]
    attending = (Rate(work="attention_decode", tier="host", way="fused", per_s=max(decode)),) if decode else ()
    return profile.model_copy(
        update={
            "accelerator": figures.accelerator,
            "processors": (Processor(tier="device", name=figures.accelerator.name, cores=1), *profile.processors),
            "memory": (*profile.memory, figures.memory),
            "rates": (*profile.rates, *figures.rates, *attending),
        }
    )


def _default_threads(pool: Pool, budget_s: float) -> tuple[float | None, tuple[str, ...]]:
    """The figure, or where it cannot be had a remark: no plan rests on it."""
    from lmoffload.profiler.default_threads import default_threads_slowdown

    try:
        return default_threads_slowdown(pool, budget_s / 4, CHILD_TIMEOUT_S), ()
    except StatedError as error:
        return None, (str(error),)


def _unsteady_remarks(memory: Sequence[MemoryRate], linear: Sequence[LinearCurve], attention: Sequence[AttentionCurve]) -> Iterator[str]:
    """One sentence for all kinds of reading with some that vary."""
    kinds = {
        "memory bandwidths": [rate.spread > UNSTEADY for rate in memory],
        "curves of linear layers": [curve.flops_per_s.unsteady for curve in linear],
        "curves of attention": [curve.rate.unsteady for curve in attention],
    }
    varying = [f"{sum(unsteady)} of {len(unsteady)} {kind}" for kind, unsteady in kinds.items() if any(unsteady)]
    if varying:
        yield f"Unsteady are {', '.join(varying)}: something else may be using this machine."


@contextmanager
def _serial_torch() -> Iterator[None]:
    """torch's own threads are one while we measure, as they are in a run; afterwards the caller has his back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
