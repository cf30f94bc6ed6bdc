"""A comparison as one self-contained HTML page: no script, no picture or font from elsewhere, nothing is asked of any server."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from lmoffload.report.comparison_charts import bars, memory_over_time, timelines
from lmoffload.report.comparison_tables import WordTable, facts_of, label_of, rows_of, settings_words, tables_of
from lmoffload_solver.comparison import Comparison

STYLE = """
:root { color-scheme: light; --ink: #1d2430; --soft: #5c6675; --line: #d9dee6; --ground: #fff; --tint: #f4f6f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 16px; background: var(--ground); color: var(--ink);
  font: 16px/1.45 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .4em 0; } h2 { font-size: 1.2rem; margin: 1.8em 0 .5em; }
h3 { font-size: 1rem; margin: 1.1em 0 .3em; } small, .note { color: var(--soft); font-weight: normal; font-size: .875rem; }
.remark { background: #fff3cd; border-left: 4px solid #d9a400; padding: .6em .8em; margin: .6em 0; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th, td { text-align: right; padding: .4em .7em; border-bottom: 1px solid var(--line); vertical-align: top; min-width: 5em; }
th { background: var(--tint); } th:first-child, td:first-child, td.words { text-align: left; }
td.words { min-width: 12em; } tr:last-child td { border-bottom: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3em 1em; margin: 0; } dt { color: var(--soft); } dd { margin: 0; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .875rem; }
.bar { margin: .5em 0; } .bar span, .bar b { display: block; font-size: .9rem; } .bar b { font-weight: normal; color: var(--soft); }
.bar i { display: block; height: 18px; min-width: 1px; border-radius: 3px; }
.lane { margin: .3em 0; } .lane span { font-size: .9rem; } .lane div { position: relative; height: 16px; background: var(--tint); }
.lane i { position: absolute; top: 0; bottom: 0; opacity: .8; border-right: 1px solid #fff; }
svg { display: block; width: 100%; height: 260px; background: var(--tint); border-radius: 6px; }
polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.limit { stroke: #b00; stroke-width: 1.5; stroke-dasharray: 6 4; vector-effect: non-scaling-stroke; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3em 1.2em; font-size: .9rem; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: .4em; }
@media (max-width: 600px) { body { padding: 10px; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5em; } }
"""


def page_of(comparison: Comparison) -> str:
    """The whole page."""
    title = escape(f"{comparison.model.name}: systems compared")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
    icon = '<link rel="icon" href="data:,">'  # a browser would ask for one
    body = "\n".join(_body(comparison, title))
    return f'<!doctype html>\n<html lang="en"><head>{head}{icon}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'


def _body(comparison: Comparison, title: str) -> Iterator[str]:
    yield f"<h1>{title}</h1>"
    yield from (f'<p class="remark">{escape(remark)}</p>' for remark in comparison.remarks)
    throughput, *others = tables_of(comparison)
    yield f"<h2>{escape(throughput.title)}</h2>"
    yield from bars(comparison)
    yield _table(throughput)
    step = list(timelines(comparison))
    if step:
        yield '<h2>One decode step</h2><p class="note">All on one scale of time; the second step of the first batch.</p>'
        yield from step
    lines = list(memory_over_time(comparison))
    if lines:
        yield "<h2>Memory over time</h2>"
        yield from lines
    for table in others:
        yield f"<h2>{escape(table.title)}</h2>"
        yield _table(table)
    yield "<h2>Settings</h2>"
    settings = tuple((label_of(system, row), settings_words(row.settings) or "by its plan") for system, row in rows_of(comparison))
    yield _table(WordTable("Settings", ("system", "settings"), settings))
    yield "<h2>How</h2><dl>"
    for name, value in facts_of(comparison):
        shown = f"<code>{escape(value)}</code>" if name == "repeat with" else escape(value)
        yield f"<dt>{escape(name)}</dt><dd>{shown}</dd>"
    yield "</dl>"


def _table(table: WordTable) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'


def _cell(text: str) -> str:
    words = len(text) > 24
    return f'<td class="words">{escape(text)}</td>' if words else f"<td>{escape(text)}</td>"
