"""docs/cases.md: every case has a row, and every test named in it is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"W": 10, "M": 8, "D": 4, "G": 6, "Q": 3}


def _page() -> str:
    return (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")


def test_every_case_has_tests_or_says_why_not() -> None:
    rows = {row[1]: row[2] for row in re.finditer(r"^\| ([WMDGQ]\d+) \| .* \| (.*) \|$", _page(), re.MULTILINE)}
    assert list(rows) == [f"{kind}{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)]
    assert all("::test_" in tests or tests.startswith("later: ") for tests in rows.values())


def test_every_test_named_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", _page())
    assert len(named) > 50
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8")]
    assert not missing
