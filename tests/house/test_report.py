"""Tables as they reach a pipe, and a workload in words."""

from __future__ import annotations

import pytest

from lmoffload.profiler.store import load_profile
from lmoffload.report.plan import work_of
from lmoffload.report.profile import profile_tables
from lmoffload.report.tables import facts, grid, show
from lmoffload_solver.workload import Workload


def test_no_line_in_a_pipe_ends_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = facts("A title that is wider than its table", [("short", "1"), ("a longer name", "23 MiB")])
    show([sizes, grid("G", ("a", "b"), [("x", "")]), "end"])
    assert capsys.readouterr().out.splitlines() == [
        "A title that is wider than its table",
        "short          1",
        "a longer name  23 MiB",
        "G",
        "a  b",
        "x",
        "end",
    ]


def test_work_in_words() -> None:
    assert work_of(Workload.of_lengths([7], 1)) == "1 prompt (7 tokens), 1 new token"
    assert work_of(Workload.of_lengths([1], 1)) == "1 prompt (1 token), 1 new token"
    assert work_of(Workload.of_lengths([7, 7], 20)) == "2 prompts (7 tokens each), 20 new tokens each"
    assert work_of(Workload.of_lengths([9, 3, 5], 20)) == "3 prompts (3 to 9 tokens), 20 new tokens each"


def test_figures_of_a_profile_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    machine = load_profile("xeon-avx512-2-cores")
    show(profile_tables(machine))
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Linear layers of"))
    last = next(number for number, line in enumerate(lines) if line.startswith("Attention"))
    assert max(map(len, lines[first:last])) <= 80
    shown = {tuple(line.split()[:2]) for line in lines[first + 2 : last]}
    assert shown == {(curve.kernel, curve.format) for curve in machine.linear}
