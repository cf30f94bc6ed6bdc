"""Measurements in a process of their own: what they tell, how they fail, and that nothing of them outlives an interruption."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmoffload.profiler.apart import ask_child, measure_disk_apart, profile_apart
from lmoffload.profiler.progress import Progress
from lmoffload_solver.errors import StatedError


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files go where the test can see them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_an_interrupted_profile_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    heard: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        heard.append(progress)
        begun = time.monotonic()  # the first stage runs in a process of the other process's
        while len(psutil.Process().children(recursive=True)) < 2 and time.monotonic() < begun + 20:
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_apart(quick=True, disk_path=tmp_path, on_progress=interrupt)
    assert [progress.what for progress in heard] == ["base"]
    assert psutil.Process().children(recursive=True) == []
    assert os.listdir(tmp_path) == []


def test_a_stated_error_comes_back_as_its_sentence() -> None:
    with pytest.raises(StatedError, match=r"^The disk of /sys/block .*give --disk .*\.$"):
        measure_disk_apart(Path("/sys/block"))


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(StatedError, match="took more than 0 s"):
        ask_child("base", 0.3)
    assert psutil.Process().children(recursive=True) == []


@pytest.mark.parametrize(("what", "arguments"), [("nothing", {}), ("disk", {"road": "."})])
def test_what_fails_says_why(what: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(StatedError, match=f"The measurement of {what} failed: (KeyError|TypeError): .*(nothing|road)"):
        ask_child(what, 60, arguments)
