"""Sizes, durations and shares as people write them (case M4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload.errors import UsageError
from lmoffload.units import (
    format_bytes,
    format_count,
    format_number,
    format_rate,
    format_remaining,
    format_seconds,
    format_share,
    parse_duration,
    parse_size,
    parse_size_or_share,
)

DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10gb", 10 * 10**9),
        ("10GB", 10 * 10**9),
        ("10G", 10 * 10**9),
        ("10GiB", 10 * 2**30),
        ("10gib", 10 * 2**30),
        ("10Gi", 10 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("10", 10),
        ("0", 0),
        (" 500MB ", 500 * 10**6),
        ("0.1GB", 10**8),
        (".5k", 500),
    ],
)
def test_sizes_told_apart(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["64000MiBGiB", "", " ", "GB", "-1GB", "+1GB", "1e9", "nan", "inf", "10iB", "1,5GB", "1.GB", "1 0GB", "0x10", "10 bits", "٣GB", "40%"],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_absurd_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="larger than any machine"):
        parse_size("99999999PiB")


@given(st.integers(0, 9999), st.sampled_from(list((DECIMAL | BINARY).items())), st.sampled_from(["", "B", "b"]), st.sampled_from(["", " "]))
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int], end: str, space: str) -> None:
    prefix, factor = unit
    if number * factor >= 2**63:
        number %= 8
    assert parse_size(f"{number}{space}{prefix}{end}") == number * factor
    assert parse_size(f"{number}{space}{prefix.lower()}{end}") == number * factor


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_one_sentence(text: str) -> None:
    try:
        size = parse_size(text)
    except UsageError as error:
        sentence = str(error)
    else:
        assert size >= 0
        return
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_size_or_share() -> None:
    assert parse_size_or_share("40%") == (None, 0.4)
    assert parse_size_or_share("0%") == (None, 0.0)
    assert parse_size_or_share("12.5 %") == (None, 0.125)
    assert parse_size_or_share("300MB") == (300 * 10**6, None)
    for wrong in ("101%", "-1%", "%", "x%"):
        with pytest.raises(UsageError, match="percentage"):
            parse_size_or_share(wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("500ms", 0.5), ("5min", 300), ("5m", 300), ("1h30m", 5400), ("2h 5min", 7500), ("1.5h", 5400), ("1d", 86400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "h", "-5s", "1h1h", "1 30", "5 parsecs", "30 1h", "1e3"])
def test_wrong_durations(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 2**60))
def test_formatted_bytes_read_back_within_their_figures(size: int) -> None:
    assert parse_size(format_bytes(size)) == pytest.approx(size, rel=0.006)


def test_formats() -> None:
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1536 * 2**20) == "1.50 GiB"
    assert format_bytes(1023.9 * 2**20) == "1.00 GiB"
    assert format_rate(2.134e9, "B") == "2.13 GB/s"
    assert format_rate(145e9, "FLOP") == "145 GFLOP/s"
    assert format_count(134_515_008) == "135 M"
    assert format_share(0.031) == "+3.1 %"
    assert format_share(-0.0001) == "+0.0 %"
    assert format_seconds(1e-13) == "0 s"
    assert [format_remaining(s) for s in (-1, 0.987, 3.7, 200)] == ["0 s", "1 s", "4 s", "3 min 20 s"]
    assert [format_number(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
    assert format_number(2, "micro-batch", "micro-batches") == "2 micro-batches"
    assert [format_seconds(s) for s in (0, 85e-6, 0.0123, 4.1, 99.6, 200, 7500)] == [
        "0 s", "85.0 µs", "12.3 ms", "4.10 s", "1 min 40 s", "3 min 20 s", "2 h 05 min",
    ]  # fmt: skip
