"""benchmarks/limited without limits, which needs no rights; with them it is used for the figures in docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LIMITED = Path(__file__).resolve().parents[2] / "benchmarks" / "limited"


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(LIMITED), *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_exit_code_output_and_last_line() -> None:
    done = limited("--no-drop", "--", sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, "out\n")
    *before, last = done.stderr.splitlines()
    assert before == ["err"]
    assert re.fullmatch(r"limited: exit=7 peak_memory_bytes=null memory_limit_hits=null wall_s=\d+\.\d\d", last)


def test_a_command_killed_by_a_signal() -> None:
    assert limited("--no-drop", "--", "sh", "-c", "kill -9 $$").returncode == 137


@pytest.mark.parametrize("arguments", [[], ["--memory", "3x", "--", "true"], ["--memory", "-1GiB", "--", "true"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert limited(*arguments).returncode == 2
