"""A machine's profile, readable."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType

from lmoffload.profiler.samples import UNSTEADY
from lmoffload.report.tables import facts, grid
from lmoffload.units import format_bytes, format_number, format_rate, format_seconds
from lmoffload_solver.machine import Curve, Disk, LinearCurve, MachineProfile

SHOWN_ROWS = (4, 16, 64, 256, 1024)
"""M of the products shown: the nearest measured ones."""


def profile_tables(machine: MachineProfile) -> Iterator[RenderableType]:
    """What the profile says, a table for each thing measured."""
    yield _machine(machine)
    for disk in machine.disks:
        yield _disk(disk)
    yield from _linear(machine.linear)
    if machine.attention:
        yield grid(
            "Attention",
            ("phase", "threads", "least", "most"),
            (
                (f"{curve.phase}, {curve.format}", str(curve.threads), *_range(curve.rate, "B" if curve.phase == "decode" else "FLOP"))
                for curve in machine.attention
            ),
        )
    if machine.contention:
        yield grid(
            "Reading and computing at once, times slower than alone",
            ("weights", "reading", "computing"),
            (
                (pair.format or "-", f"{pair.first_slowdown:.2f}", f"{pair.second_slowdown:.2f}")
                for pair in machine.contention
                if (pair.first, pair.second) == ("disk_read", "host_compute")
            ),
        )
    if machine.rates:
        yield grid(
            "Quantizing and attending, amounts a second (see docs/profile.md)",
            ("work", "format", "processor", "way", "rate"),
            ((r.work.replace("_", " "), r.format or "-", r.tier, r.way, f"{r.per_s:.3g}") for r in machine.rates),
        )
    if machine.links:
        yield grid(
            "Links",
            ("link", "memory", "least", "most"),
            (
                (f"{at.near} - {at.far} {at.direction}", "page-locked" if at.page_locked else "pageable", *_range(at.bytes_per_s, "B"))
                for at in machine.links
            ),
        )
    yield "A question mark: an unsteady reading, which varied by more than a quarter."
    yield from (f"[yellow]{remark}[/yellow]" for remark in machine.remarks)


def _machine(machine: MachineProfile) -> RenderableType:
    host, overheads = machine.host, machine.overheads
    rows = [("profile", f"{machine.name}, {machine.provenance}")]
    rows += [(f"processor ({p.tier})", f"{p.name}, {p.cores} cores, {' '.join(p.instruction_sets)}") for p in machine.processors]
    usable, total = format_bytes(host.memory_usable_bytes), format_bytes(host.memory_total_bytes)
    rows += [
        ("memory", f"{usable} usable of {total} ({host.memory_limited_by})"),
        ("cores", f"{host.cores} ({host.cores_limited_by})"),
        ("last-level cache", format_bytes(host.last_level_cache_bytes)),
    ]
    rows += [
        *(
            (f"{rate.tier} memory read, {format_number(rate.threads, 'thread')}", _rate(rate.bytes_per_s, "B", rate.spread))
            for rate in machine.memory
        ),
        ("a layer's fixed cost", format_seconds(overheads.layer_s)),
        ("the same said by Python, more", format_seconds(overheads.python_layer_s)),
        ("the same on an emulated device, more", format_seconds(overheads.device_layer_s)),
        ("a step's fixed cost", format_seconds(overheads.step_s)),
        *(
            (f"handing on a product, {format_number(threads, 'thread')}", format_seconds(cost))
            for threads, cost in overheads.linear_call_s.items()
        ),
        ("the process itself", format_bytes(machine.base_bytes)),
    ]
    if machine.default_threads_slowdown is not None:
        rows.append(("libraries' default threads", f"{machine.default_threads_slowdown:.1f} times slower than ours"))
    return facts("Machine", rows)


def _disk(disk: Disk) -> RenderableType:
    direct = "direct" if disk.direct else "through the page cache"
    checked = "" if disk.cache_excluded else ", page cache not excluded: unsure"
    title = f"Disk {disk.file_system} ({disk.device}, {format_bytes(disk.free_bytes)} free, {direct}{checked})"
    curves = [("read", c) for c in disk.read] + [("write", c) for c in disk.write]
    return grid(
        title,
        ("", "in flight", "least", "most", "at request size"),
        (
            (way, str(curve.threads), *_range(curve.bytes_per_s, "B"), format_bytes(_best_x(curve.bytes_per_s)))
            for way, curve in curves
        ),
    )


def _linear(curves: tuple[LinearCurve, ...]) -> Iterator[RenderableType]:
    """Of each kernel and format, the curve of the largest layer with the most threads; the others are in the file."""
    chosen: dict[tuple[str, str], LinearCurve] = {}
    for curve in sorted(curves, key=lambda c: (c.threads, c.n * c.k)):
        chosen[curve.kernel, curve.format] = curve
    for (n, k, threads), alike in groupby(sorted(chosen.values(), key=_case), key=_case):
        yield grid(
            f"Linear layers of {n} x {k} with {format_number(threads, 'thread')}, GFLOP/s for M rows",
            ("kernel", "weights", *(f"M = {m}" for m in SHOWN_ROWS)),
            (
                (
                    curve.kernel,
                    curve.format + ("" if curve.beyond_cache else " (in cache)"),
                    *(_at(curve.flops_per_s, m) for m in SHOWN_ROWS),
                )
                for curve in alike
            ),
        )


def _case(curve: LinearCurve) -> tuple[int, int, int]:
    return curve.n, curve.k, curve.threads


def _at(curve: Curve, m: int) -> str:
    """GFLOP/s where M is nearest, or a dash where nothing near was measured."""
    index = min(range(len(curve.x)), key=lambda i: abs(curve.x[i] - m))
    if not 0.5 <= curve.x[index] / m <= 2:
        return "-"
    return f"{curve.y[index] / 1e9:.1f}" + _mark(curve.spread[index] > UNSTEADY)


def _range(curve: Curve, unit: str) -> tuple[str, str]:
    least, most = (curve.y.index(f(curve.y)) for f in (min, max))
    mark = _mark(curve.unsteady)
    return format_rate(curve.y[least], unit) + mark, format_rate(curve.y[most], unit) + mark


def _rate(rate: float, unit: str, spread: float) -> str:
    return format_rate(rate, unit) + _mark(spread > UNSTEADY)


def _mark(unsteady: bool) -> str:
    return " ?" if unsteady else ""


def _best_x(curve: Curve) -> float:
    return curve.x[curve.y.index(max(curve.y))]
