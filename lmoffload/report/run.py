"""A run, readable: predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import RenderableType

from lmoffload.report.tables import facts, grid
from lmoffload.units import format_bytes, format_seconds, format_share
from lmoffload_solver.plan import Predicted
from lmoffload_solver.report import RunReport, Waste

_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("prefill_s", "prefill", format_seconds),
    ("decode_s", "decode", format_seconds),
    ("total_s", "in all", format_seconds),
    ("step_s", "a decode step", format_seconds),
    ("tokens_per_s", "tokens/s", lambda rate: f"{rate:.2f}"),
    ("decode_tokens_per_s", "tokens/s in decode", lambda rate: f"{rate:.2f}"),
)


def run_tables(report: RunReport) -> Iterator[RenderableType]:
    """Times, busy resources, task kinds, memory and disk."""
    yield grid("Run", ("", "predicted", "measured", "error"), _rows(report))
    yield grid("Tasks", ("kind", "count", "predicted", "measured"), _tasks(report))
    weights = ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in report.resident_bytes.items()) or "none"
    if report.threads:
        yield grid("Threads", ("class", "threads", "on cores"), _threads(report))
    yield facts(
        "Memory and disk",
        (
            ("weights kept in memory", weights),
            ("read from disk", format_bytes(report.bytes_read)),
            ("peak of the process", format_bytes(report.peak_rss_bytes)),
            *_waste(report.waste),
        ),
    )
    yield from (f"[yellow]{remark}[/yellow]" for remark in report.remarks)


def run_line(report: RunReport) -> str:
    """The run in one line."""
    return (
        f"{report.measured.tokens_per_s:.2f} tokens/s (predicted {report.predicted.tokens_per_s:.2f}) in "
        f"{format_seconds(report.measured.total_s)}, {format_bytes(report.bytes_read)} read from disk."
    )


def _waste(waste: Waste | None) -> Iterator[tuple[str, str]]:
    if waste is not None:
        shares = f"{waste.padding:.1%} of tokens computed, {waste.idle_places:.1%} of places, {waste.unused_kv:.1%} of room in the KV cache"
        yield "in vain", shares


def _rows(report: RunReport) -> Iterator[tuple[str, str, str, str]]:
    yield "tokens generated", *_pair(report, lambda figures: figures.tokens_per_s * figures.total_s, lambda tokens: str(round(tokens)))
    for field, name, form in _FIELDS:
        yield name, form(getattr(report.predicted, field)), form(getattr(report.measured, field)), _error(report.error.get(field))
    for resource in sorted({*report.predicted.resources, *report.measured.resources}):
        yield (f"{resource} busy", *_pair(report, lambda figures, name=resource: figures.resources.get(name), format_seconds))  # type: ignore[misc]
    if report.overlapped_s is not None:
        yield "two resources busy", "-", format_seconds(report.overlapped_s), "-"
    for tier in sorted({*report.predicted.peak_bytes, *report.measured.peak_bytes} - {"disk"}):
        yield (f"peak on {tier}", *_pair(report, lambda figures, name=tier: figures.peak_bytes.get(name), format_bytes))  # type: ignore[misc]


def _pair(report: RunReport, of: Callable[[Predicted], float | None], form: Callable[[float], str]) -> tuple[str, str, str]:
    predicted, measured = of(report.predicted), of(report.measured)
    error = measured / predicted - 1 if predicted and measured is not None else None
    return *("-" if value is None else form(value) for value in (predicted, measured)), _error(error)  # type: ignore[return-value]


def _tasks(report: RunReport) -> Iterator[tuple[str, str, str, str]]:
    for kind, figures in report.tasks.items():
        predicted = "-" if figures.predicted_s is None else format_seconds(figures.predicted_s)
        yield kind, str(figures.count), predicted, format_seconds(figures.measured_s)


def _threads(report: RunReport) -> Iterator[tuple[str, str, str]]:
    for name, figures in report.threads.items():
        yield name, str(figures.planned), format_seconds(figures.cpu_s)


def _error(error: float | None) -> str:
    return "-" if error is None else format_share(error)
