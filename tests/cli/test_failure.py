"""Errors that nobody foresaw: one sentence, and a file to attach to an issue."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmoffload.api import model as opening
from lmoffload.settings import Settings
from tests.cli.conftest import Call


@pytest.fixture
def broken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours, deep inside."""

    def fail(name: str) -> None:
        raise ZeroDivisionError("of two\nnumbers")

    monkeypatch.setattr(opening, "open_model", fail)


@pytest.mark.usefixtures("broken")
def test_a_sentence_and_a_report(call: Call) -> None:
    shown = call("inspect", "somewhere")
    assert (shown.code, shown.out, len(shown.err.splitlines())) == (1, "", 1)
    (report,) = (Settings.of_user().cache_directory / "errors").iterdir()
    assert f"(ZeroDivisionError: of two numbers); please attach {report} to an issue" in shown.sentence
    text = report.read_text()
    for word in ("lmoffload inspect somewhere", "torch ", "memory_usable_bytes", "Traceback", "in fail"):
        assert word in text
    assert "Traceback" in call("inspect", "somewhere", "--debug").err


@pytest.mark.usefixtures("broken")
def test_where_no_report_can_be_written(call: Call, home: Path) -> None:
    home.write_text("a file where the home should be")
    shown = call("inspect", "somewhere")
    assert (shown.code, len(shown.err.splitlines())) == (1, 1)
    assert "--debug" in shown.sentence


def test_what_users_write_stays_out(home: Path) -> None:
    from lmoffload.report.failure import write_failure

    arguments = ["run", "m", "-p", "secret 1", "--prompt=secret 2", "--stop", "secret 3", "-psecret 4", "--top-k", "5"]
    report = write_failure(ValueError("no"), arguments)
    assert report is not None
    told = report.read_text().splitlines()[0]
    assert told == "lmoffload run m -p TEXT --prompt=TEXT --stop TEXT -pTEXT --top-k 5"


def test_a_foreseen_error_leaves_no_report(call: Call, home: Path) -> None:
    assert call("inspect", "nowhere").code == 1
    assert not (Settings.of_user().cache_directory / "errors").exists()
