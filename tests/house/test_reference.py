"""docs/reference.md is what the commands' help says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/write_reference.py", "--check"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_reference_is_not_stale() -> None:
    done = _check(ROOT)
    assert done.returncode == 0, done.stderr


def test_a_stale_reference_is_noticed(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "write_reference.py").read_text(encoding="utf-8")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts" / "write_reference.py").write_text(script, encoding="utf-8")
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").replace("`--quick`", "`--fast`")
    (tmp_path / "docs" / "reference.md").write_text(page, encoding="utf-8")
    done = _check(tmp_path)
    assert done.returncode == 1
    assert "stale" in done.stderr
