"""Charts of a comparison as plain HTML: bars and lanes are boxes sized in per cent, so that they stay readable at any width."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from lmoffload.report.comparison_tables import label_of, rows_of, three_figures
from lmoffload.units import format_bytes, format_seconds
from lmoffload_solver.comparison import Comparison, Run, Span

COLOURS = ("#2a6fbb", "#d1662b", "#3a8f4d", "#8a4fb0", "#b8972a", "#b03a4f", "#3b8f96", "#666e7a")
MOST_SPANS = 600
"""Drawn in one lane."""


def bars(comparison: Comparison) -> Iterator[str]:
    """Throughput of every row, the median as a bar, the spread in words."""
    rates = [(label_of(system, row), row.median("tokens_per_s"), row.spread("tokens_per_s")) for system, row in rows_of(comparison)]
    most = max((rate for _, rate, _ in rates if rate), default=1.0)
    for number, (label, rate, spread) in enumerate(rates):
        words = "no run counts"
        if rate is not None and spread is not None:
            words = f"{three_figures(rate)} tokens/s ({three_figures(spread[0])}–{three_figures(spread[1])})"
        width = 0.0 if rate is None else 100 * rate / most
        box = f'<i style="width:{width:.2f}%;background:{_colour(number)}"></i>'
        yield f'<div class="bar"><span>{escape(label)}</span>{box}<b>{words}</b></div>'


def timelines(comparison: Comparison) -> Iterator[str]:
    """One decode step of every system: what each of its lanes did, all on one scale of time."""
    told = [(label_of(system, row), row.middle) for system, row in rows_of(comparison)]
    drawn = [(label, run) for label, run in told if run is not None and run.spans]
    scale = max((span.end_s for _, run in drawn for span in run.spans), default=0.0)
    for number, (label, run) in enumerate(drawn):
        yield f"<h3>{escape(label)} <small>{format_seconds(max(span.end_s for span in run.spans))}</small></h3>"
        for lane in dict.fromkeys(span.lane for span in run.spans):
            yield _lane(lane, run, scale, _colour(number))


def _lane(lane: str, run: Run, scale: float, colour: str) -> str:
    spans = [span for span in run.spans if span.lane == lane]
    busy = sum(span.end_s - span.begin_s for span in spans)
    boxes = "".join(_box(span, scale, colour) for span in spans[:MOST_SPANS])
    return f'<div class="lane"><span>{escape(lane)} <small>{format_seconds(busy)}</small></span><div>{boxes}</div></div>'


def _box(span: Span, scale: float, colour: str) -> str:
    seconds = span.end_s - span.begin_s
    place = f"left:{100 * span.begin_s / scale:.3f}%;width:{max(0.15, 100 * seconds / scale):.3f}%;background:{colour}"
    return f'<i title="{escape(span.name or span.lane)}: {format_seconds(seconds)}" style="{place}"></i>'


def memory_over_time(comparison: Comparison) -> Iterator[str]:
    """Lines of the median runs, with the limit; the axes' ends are told in words beside."""
    drawn = [(label_of(system, row), row.middle or row.runs[-1]) for system, row in rows_of(comparison)]
    drawn = [(label, run) for label, run in drawn if len(run.memory) > 1]
    if not drawn:
        return
    limit = comparison.granted.memory_bytes or 0
    longest = max(run.memory[-1][0] for _, run in drawn) or 1.0
    most = max([limit, *(size for _, run in drawn for _, size in run.memory)])
    lines = []
    if limit:
        lines.append(f'<line x1="0" x2="1000" y1="{_y(limit, most)}" y2="{_y(limit, most)}" class="limit"/>')
    for number, (label, run) in enumerate(drawn):
        points = " ".join(f"{1000 * seconds / longest:.1f},{_y(size, most)}" for seconds, size in run.memory)
        lines.append(f'<polyline points="{points}" stroke="{_colour(number)}"><title>{escape(label)}</title></polyline>')
    yield f'<svg viewBox="0 0 1000 300" preserveAspectRatio="none" role="img" aria-label="memory over time">{"".join(lines)}</svg>'
    ends = f"0 to {format_seconds(longest)} from left to right, 0 to {format_bytes(most)} from the foot up"
    yield f'<p class="note">{ends}{"; the dashed line is the limit" if limit else ""}.</p><ul class="legend">'
    for number, (label, _) in enumerate(drawn):
        yield f'<li><i style="background:{_colour(number)}"></i>{escape(label)}</li>'
    yield "</ul>"


def _y(size: int, most: int) -> str:
    return f"{300 - 296 * size / most:.1f}"


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
