"""A comparison as tables of words: the same ones for the terminal, for Markdown and for the page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from lmoffload.report.plan import work_of
from lmoffload.units import format_bytes, format_number, format_rate, format_seconds, format_share
from lmoffload_solver.comparison import Comparison, Figures, Granted, Row, Run, Settings, System

OURS = "lmoffload"


@dataclass(frozen=True, slots=True)
class WordTable:
    """A table whose first column names and whose others hold figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables_of(comparison: Comparison) -> Iterator[WordTable]:
    """Everything that was found, the most important first."""
    yield _throughput(comparison)
    yield _memory(comparison)
    yield _tokens(comparison)
    if any(run.full is not None for _, row in rows_of(comparison) for run in row.runs):
        yield _projections(comparison)
    if any(system.trials for system in comparison.systems):
        yield _sweep(comparison)
    yield WordTable("Systems", ("system", "versions and how it ran", "started as"), tuple(
        (system.name, system.about or system.sentence or "", system.command) for system in comparison.systems
    ))  # fmt: skip


def facts_of(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What was compared, where, and how to repeat it."""
    workload = comparison.workload
    yield "model", f"{comparison.model.name}, {format_bytes(comparison.model_bytes)} of weights"
    yield "work", work_of(workload)
    yield "quality", comparison.quality
    yield "limits", granted_words(comparison.granted)
    if comparison.emulated_device is not None:
        yield "emulated device", comparison.emulated_device
    twice = ", every process did the work twice and the second time counts" if comparison.warm else ""
    rounds = format_number(comparison.rounds, "interleaved round")
    cache = "page cache emptied before each" if comparison.cold else "page cache NOT emptied, so that runs find what earlier ones read"
    yield "runs", f"{rounds}, medians (least–largest); {cache}{twice}"
    if comparison.measured_tokens < workload.gen_len:
        yield "tokens", f"{comparison.measured_tokens} of {workload.gen_len} were generated, the time of the rest is projected"
    yield "machine", f"{comparison.processor}, {comparison.host.cores} cores, {format_bytes(comparison.host.memory_total_bytes)}"
    yield "profile", comparison.machine
    yield "versions", ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    yield "made", comparison.made_at
    yield "repeat with", shlex.join(comparison.command)


def granted_words(granted: Granted) -> str:
    """Limits in words."""
    parts = []
    if granted.memory_bytes is not None:
        parts.append(f"{format_bytes(granted.memory_bytes)} of memory, page cache included")
    if granted.read_bytes_per_s is not None:
        parts.append(f"{format_rate(granted.read_bytes_per_s, 'B')} from disk")
    if granted.cores:
        parts.append(f"processors {', '.join(map(str, granted.cores))}")
    if not parts:
        return "none"
    return ", ".join(parts) + ("" if granted.enforced else " (NOT enforced: control groups cannot be used here)")


def rows_of(comparison: Comparison) -> Iterator[tuple[System, Row]]:
    """Every row with its system."""
    for system in comparison.systems:
        for row in system.rows:
            yield system, row


def label_of(system: System, row: Row) -> str:
    """A row's name."""
    memory = "" if system.memory_bytes is None else f" in {format_bytes(system.memory_bytes)}"
    return system.name + memory + ("" if row.kind == "only" else f", {row.kind}")


def row_state(row: Row) -> str:
    """What came of a row's runs, in a few words."""
    failed = failure_of(row)
    if failed is None:
        return ", ".join(dict.fromkeys(run.status for run in row.runs))
    return f"{failed.status} in 1 of {len(row.runs)} runs" if row.counted else failed.status


def failure_of(row: Row) -> Run | None:
    """The run that failed, after which there are no more."""
    return next((run for run in row.runs if not run.counts), None)


def failures_of(comparison: Comparison) -> Iterator[str]:
    """Why rows have no figures, a sentence each."""
    for system in comparison.systems:
        if not system.rows:
            yield f"{system.name}: {system.status}: {system.sentence}"
        for row in system.rows:
            if (failed := failure_of(row)) is not None:
                yield f"{label_of(system, row)}: {failed.status}: {failed.sentence}"


def settings_words(settings: Settings) -> str:
    """Settings in one line."""
    return ", ".join(f"{name} {'default' if value is None else value}" for name, value in settings.items())


def ours(comparison: Comparison) -> float | None:
    """This engine's own median throughput."""
    row = next((system.best for system in comparison.systems if system.name == OURS), None)
    return None if row is None else row.median("tokens_per_s")


def _throughput(comparison: Comparison) -> WordTable:
    reference = ours(comparison)
    rows = []
    for system in comparison.systems:
        if not system.rows:
            rows.append((system.name, system.weights, system.status, *["–"] * 5))
        for row in system.rows:
            rate = row.median("tokens_per_s")
            ratio = f"{reference / rate:.2f}" if rate and reference and system.name != OURS else "–"
            cells = (_rate(row, field) for field in ("tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s"))
            rows.append((label_of(system, row), system.weights, row_state(row), *cells, _first_token(row), ratio))
    columns = ("system", "weights", "state", "all", "prefill", "decode", "first token", f"{OURS} ÷ it")
    slower = [row[0] for row in rows if row[-1] != "–" and float(row[-1]) < 1]
    wins = [f"Faster than {OURS}: {', '.join(slower)}."] if slower else []
    return WordTable("Throughput, tokens/s", columns, tuple(rows), " ".join([*wins, *failures_of(comparison)]))


def _rate(row: Row, field: str) -> str:
    middle, spread = row.median(field), row.spread(field)
    if middle is None or spread is None or middle == 0:
        return "–"
    return three_figures(middle) + (f" ({three_figures(spread[0])}–{three_figures(spread[1])})" if len(row.counted) > 1 else "")


def three_figures(number: float) -> str:
    """A rate without more figures than it has meaning."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _first_token(row: Row) -> str:
    seconds = row.median("first_token_s")
    return "–" if seconds is None else format_seconds(seconds)


def _memory(comparison: Comparison) -> WordTable:
    rows = []
    for system, row in rows_of(comparison):
        run = row.middle or row.runs[-1]
        load = "–" if run.figures is None else format_seconds(run.figures.load_s)
        sizes = (run.peak_memory_bytes, run.peak_rss_bytes, run.bytes_read, run.disk_bytes_read)
        rows.append((label_of(system, row), *("–" if size is None else format_bytes(size) for size in sizes), load))
    columns = ("system", "peak, page cache included", "peak of the process", "read by the process", "read from the disk", "loading")
    return WordTable("Memory and disk", columns, tuple(rows), "Of the median run; loading is part of no other time.")


def _tokens(comparison: Comparison) -> WordTable:
    rows = [(s.name, s.check.status, s.check.sentence) for s in comparison.systems if s.check is not None]
    note = "Greedy tokens of the first prompts against this engine's in class exact (fp32)."
    more = " Systems that compute in bf16 may choose another token where two are nearly as likely."
    return WordTable("Tokens", ("system", "state", "beside the reference"), tuple(rows), note + more)


def _projections(comparison: Comparison) -> WordTable:
    rows = []
    for system, row in rows_of(comparison):
        for run in row.counted:
            if run.figures is not None and run.full is not None and run.projection_error is not None:
                error = format_share(run.projection_error)
                rows.append((label_of(system, row), format_seconds(run.figures.total_s), format_seconds(run.full.total_s), error))
    return WordTable("Projections", ("system", "projected", "measured", "error"), tuple(rows))


def _sweep(comparison: Comparison) -> WordTable:
    rows = []
    for system in comparison.systems:
        for run in system.trials:
            rows.append((system.name, settings_words(run.settings), _trial_words(run)))
    note = "Each run generates three tokens for one batch; tokens/s are projected to the whole work."
    return WordTable("Sweep", ("system", "settings", "tokens/s"), tuple(rows), note)


def _trial_words(run: Run) -> str:
    figures: Figures | None = run.figures
    return f"{run.status}: {run.sentence}" if figures is None else f"{figures.tokens_per_s:.2f}"
