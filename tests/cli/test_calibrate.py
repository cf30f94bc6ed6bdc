"""`lmoffload calibrate` on the reports of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmoffload.checkpoint import make_dummy
from lmoffload.profiler.store import default_profile_path, load_profile, save_profile
from lmoffload_solver.calibration import calibrate
from lmoffload_solver.costs import PHASES
from lmoffload_solver.report import RunReport
from lmoffload_solver.value import read_value
from tests.cli.conftest import Call, files_below

WORK = ("--num-prompts", "10", "--prompt-len", "64", "--gen-len", "12", "--weights-memory", "60%")
LAYERS, LINEARS = 2, 7


@pytest.fixture(scope="module")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of a real size, so that products take longer than their calls."""
    return make_dummy("smollm2-135m", tmp_path_factory.mktemp("dummy") / "model", layers=LAYERS)


@pytest.fixture
def report(call: Call, profiled: Path, dummy: Path) -> Path:
    assert call("run", dummy, *WORK, "--report", "report.json", "--output", "out.jsonl").code == 0
    return Path("report.json")


def test_reports_tell_each_part_of_each_phase(report: Path) -> None:
    read = read_value(RunReport, report, "report")
    assert read.performed is not None
    for phase in PHASES:
        figures = read.phases[phase]
        assert all(one.predicted_s is not None and one.predicted_s > 0 and one.measured_s > 0 for one in figures.values()), figures
        parts = sum(figures[part].measured_s for part in ("products", "attention", "rest"))
        assert parts == pytest.approx(figures["compute"].measured_s)
    for kind in ("read_weights", "compute"):
        assert sum(read.phases[phase][kind].measured_s for phase in PHASES) == pytest.approx(read.tasks[kind].measured_s)  # type: ignore[index]
    tokens = {work.phase: work.rows for work in read.performed.others}
    assert tokens == {"prefill": 10, "decode": 10 * 11}
    for work in read.performed.others:
        assert work.layers == LAYERS * work.steps
        products = sum(p.count for p in read.performed.products if p.phase == work.phase)
        assert products >= LINEARS * work.layers + work.steps, "every matrix of every layer, and the head in pieces"


def test_a_profile_is_mended_once(call: Call, report: Path) -> None:
    before = load_profile()
    shown = call("calibrate", report, "--dry-run")
    assert shown.code == 0 and "Nothing was written." in shown.out and "linear, widen_tiles on bf16" in shown.out
    assert load_profile() == before and len(files_below(default_profile_path().parent)) == 1

    found = json.loads(call("calibrate", report, "--json").out)
    assert found["reports"] == 1 and found["corrections"]
    after, run = load_profile(), read_value(RunReport, report, "report").performed
    assert run is not None and after != before and load_profile(found["backup"]) == before
    assert "; calibrated 2" in after.provenance and after.provenance.endswith("with 1 run")
    linear = [one for one in calibrate(after, [run]).corrections if one.curve.startswith("linear")]
    assert linear and all(one.before_s == pytest.approx(one.measured_s, rel=0.1) for one in linear), linear

    again = call("calibrate", report, report)
    assert again.code == 0 and "had been folded in before" in again.out and "Nothing was written." in again.out
    assert load_profile() == after


def test_what_is_no_report_of_this_machine_is_refused(call: Call, report: Path) -> None:
    assert call("calibrate", "nothing.json").sentence.startswith("lmoffload: The report nothing.json cannot be read")
    save_profile(load_profile().model_copy(update={"name": "another"}))
    refused = call("calibrate", report)
    assert refused.code == 1
    assert "report.json is of a run by the profile of 'by-hand', and this machine's is of 'another'." in refused.sentence
