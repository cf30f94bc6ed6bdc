"""What formats cost a model, readable."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from lmoffload.report.tables import grid
from lmoffload_solver.formats import QUALITY_BITS, format_of
from lmoffload_solver.loss import QUALITY_BOUND, Loss, LossTable, allowed


def quality_tables(table: LossTable) -> Iterator[RenderableType]:
    """The losses, and the classes that each part is offered in."""
    columns = ("what", "format", "activations", "perplexity", "loss", "equal tokens", "offered in")
    exact = ("as stored", "", "fp32", f"{table.reference_perplexity:.3f}", "", "", "exact")
    rows = [
        (
            loss.what,
            loss.format,
            loss.activations if loss.what == "weights" else "",
            f"{loss.perplexity:.3f}",
            f"{loss.loss:+.2%}",
            f"{loss.equal_tokens:.1%}",
            ", ".join(_classes(table, loss)),
        )
        for loss in table.losses
    ]
    title = f"{table.model.name} on {table.text.tokens} tokens of {table.text.name}"
    yield grid(title, columns, [exact, *rows])
    bounds = ", ".join(f"{name} {bound:.0%}" for name, bound in QUALITY_BOUND.items())
    yield f"Bounds on the loss of a class: {bounds}. Several lossy parts together are taken to cost the sum."


def _classes(table: LossTable, loss: Loss) -> Iterator[str]:
    for name in QUALITY_BOUND:
        if format_of(loss.format).bits_per_element >= QUALITY_BITS[name] and allowed(table, name, loss.part):
            yield name
    yield "any"
