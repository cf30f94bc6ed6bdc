"""The documents hold: examples run, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmoffload.profiler.limits import disk_of
from lmoffload.profiler.store import save_profile
from tests.cli.machines import machine

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
PROFILING = "\nlmoffload.profile(quick=True)  # once per machine; kept in your data directory\n"
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not broken


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md" and f"({page.name})" not in index]
    assert not missing


def test_the_python_example_runs(tmp_path: Path) -> None:
    """From nothing: it makes a model, plans and runs. The minute of the profile is spared (a short one is made by tests/profiler)."""
    example = PYTHON_BLOCK.findall((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))[0]
    assert example.count(PROFILING) == 1
    save_profile(machine(file_system=disk_of(tmp_path).mount_point), tmp_path / "data" / "lmoffload" / "machine.json")
    environment = os.environ | {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("OMP_WAIT_POLICY", None)
    program = [sys.executable, "-c", example.replace(PROFILING, "\n")]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("predicted: ")
    assert sum(" -> " in line for line in lines) >= 2
    assert lines[-1].startswith("measured: ")
    assert "Threads may wait busily" not in done.stderr
