"""A calibration, readable: which curves were off, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from lmoffload.report.tables import grid
from lmoffload.units import format_bytes, format_seconds
from lmoffload_solver.calibration import Correction


def calibration_tables(
    corrections: Sequence[Correction], profile: str, backup: str | None, known: Sequence[str]
) -> Iterator[RenderableType]:
    """What was measured beside what the profile said and says, worst first; then where the profiles are."""
    if corrections:
        yield grid(
            "Calibration",
            ("curve", "at", "measured", "predicted before", "now", "took"),
            (
                (
                    one.curve,
                    _place(one),
                    format_seconds(one.measured_s),
                    format_seconds(one.before_s),
                    format_seconds(one.after_s),
                    f"{one.times_off:.2f} times as long",
                )
                for one in sorted(corrections, key=lambda one: -abs(one.measured_s - one.before_s))
            ),
        )
    for path in known:
        yield f"{path} had been folded in before."
    if backup is None:
        yield "Nothing was written."
    else:
        yield f"Written to {profile}; as it was before, it is kept as {backup}."


def _place(one: Correction) -> str:
    if not one.at:
        return "-"
    if one.curve.startswith("disk"):
        return format_bytes(one.at)
    return f"{one.at:.0f} {'tokens' if one.curve.startswith('attention') else 'rows'}"
