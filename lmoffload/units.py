"""Sizes, durations, shares and rates as people write and read them.

Decimal and binary prefixes are told apart: 1 GB is 10^9 bytes, 1 GiB is 2^30. A prefix without a final "B" ("10G") is decimal, a bare
number is bytes, and case does not matter.
"""

from __future__ import annotations

import re
from fractions import Fraction

from lmoffload.errors import UsageError

_PREFIXES = ("", "k", "m", "g", "t", "p")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) *(?:([kmgtp]?)(i?)(b?))", re.IGNORECASE)
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *%")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(ms|min|s|m|h|d|)")
_SECONDS: dict[str, Fraction] = {
    "ms": Fraction(1, 1000), "s": Fraction(1), "": Fraction(1),
    "m": Fraction(60), "min": Fraction(60), "h": Fraction(3600), "d": Fraction(86400),
}  # fmt: skip
_LARGEST_SIZE = 2**63 - 1


def parse_size(text: str) -> int:
    """Bytes of a size such as "4GiB", "500MB", "1.5 TiB" or "4096"; parts of a byte are cut off.

    Raises:
        UsageError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{text!r} is not a size; write one like 4GiB (binary) or 500MB (decimal).")
    base = 1024 if match[3] else 1000
    size = int(Fraction(match[1]) * base ** _PREFIXES.index(match[2].lower()))
    if size > _LARGEST_SIZE:
        raise UsageError(f"{text!r} is larger than any machine.")
    return size


def parse_size_or_share(text: str) -> tuple[int | None, float | None]:
    """(bytes, None) of a size, or (None, share) of a percentage from 0% to 100%.

    Raises:
        UsageError: the text is neither.
    """
    if not text.strip().endswith("%"):
        return parse_size(text), None
    match = _PERCENT.fullmatch(text.strip())
    if match is None or Fraction(match[1]) > 100:
        raise UsageError(f"{text!r} is not a percentage from 0% to 100%.")
    return None, float(Fraction(match[1]) / 100)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as "90", "500ms", "5min" or "1h30m".

    Raises:
        UsageError: the text is not a duration above zero.
    """
    rest, seconds, units = text.strip().lower(), Fraction(0), set()
    while (match := _DURATION_PART.match(rest)) and match[2] not in units and "" not in units:
        units.add(match[2])
        seconds += Fraction(match[1]) * _SECONDS[match[2]]
        rest = rest[match.end() :].lstrip()
    if rest or not units or not seconds:
        raise UsageError(f"{text!r} is not a duration; write one like 90s, 5min or 1h30m.")
    return float(seconds)


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with three figures: 512 B, 1.50 GiB."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_rate(amount_per_s: float, unit: str) -> str:
    """A rate in decimal units with three figures: 2.13 GB/s with unit "B", 145 GFLOP/s with unit "FLOP"."""
    return _scaled(amount_per_s, 1000, tuple(f"{prefix}{unit}/s" for prefix in ("", "k", "M", "G", "T", "P")))


def format_count(count: float) -> str:
    """A count in decimal units: 135 M, 1.10 G."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P")).strip()


def format_seconds(seconds: float) -> str:
    """Seconds as a person reads them: 85 µs, 4.10 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 3595:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if seconds >= 99.5:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        if seconds * factor >= 0.9995:
            return f"{_three_figures(seconds * factor)} {unit}"
    return "0 s"


def format_remaining(seconds: float) -> str:
    """An estimate of what is left, in whole seconds: 4 s, 3 min 20 s, 2 h 05 min."""
    return format_seconds(seconds) if seconds >= 99.5 else f"{round(max(seconds, 0))} s"


def format_number(count: int, noun: str, plural: str | None = None) -> str:
    """A number of things: 1 layer, 2 layers."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def format_share(share: float) -> str:
    """A signed share in per cent: +3.1 %; what rounds to nothing has a plus."""
    return f"{round(share * 100, 1) + 0.0:+.1f} %"


def _scaled(amount: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(amount) >= base * 0.9995 and power < len(units) - 1:
        amount /= base
        power += 1
    number = f"{amount:.0f}" if power == 0 and amount == int(amount) else _three_figures(amount)
    return f"{number} {units[power]}"


def _three_figures(number: float) -> str:
    size = abs(number)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{number:.{digits}f}"
