"""What-if answers, readable."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from lmoffload.report.tables import facts
from lmoffload.units import format_bytes
from lmoffload_solver.what_if import Answer, Change, WhatIf


def what_if_tables(answered: WhatIf) -> Iterator[RenderableType]:
    """One line per change."""
    rows = [("as it is", _rate(answered.tokens_per_s))]
    rows += [(_words(answer.change), _answer(answer)) for answer in answered.answers]
    if answered.together is not None:
        rows.append(("all together", _rate(answered.together)))
    yield facts("What if", iter(rows))


def _words(change: Change) -> str:
    name = change.resource.replace("_", " ")
    if change.added_bytes:
        sign = "+" if change.added_bytes > 0 else "-"
        return f"{sign}{format_bytes(abs(change.added_bytes))} {name}"
    return f"{name} {change.factor:g}x"


def _answer(answer: Answer) -> str:
    text = _rate(answer.tokens_per_s)
    if answer.gain is not None:
        text += f" ({answer.gain:+.1%})"
    if answer.by_price_tokens_per_s is not None:
        text += f"; by its marginal price {answer.by_price_tokens_per_s:.2f}"
    return text


def _rate(tokens_per_s: float | None) -> str:
    return "does not fit" if tokens_per_s is None else f"{tokens_per_s:.2f} tokens/s"
