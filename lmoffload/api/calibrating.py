"""Calibration of this machine's profile by the reports of runs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from lmoffload.errors import StatedError
from lmoffload.profiler.store import default_profile_path, load_profile, save_profile
from lmoffload_solver.calibration import Correction, calibrate
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.performed import Performed
from lmoffload_solver.report import RunReport
from lmoffload_solver.value import Value, read_value


class Calibration(Value):
    """What a call of `calibrate` found, and where the profiles are."""

    profile: str
    """Path of the profile."""
    backup: str | None
    """Where the profile is kept as it was; None: nothing was written."""
    reports: int
    """Folded in by this call."""
    known: tuple[str, ...]
    """Reports that had been folded in before, and were left out."""
    corrections: tuple[Correction, ...]


def calibrate_profile(reports: Sequence[Path], *, dry_run: bool = False) -> Calibration:
    """Fold runs' reports into this machine's own profile. The profile as it was is kept beside it.

    Args:
        dry_run: write nothing.

    Raises:
        StatedError: a file is no report, tells no work, or is of another machine; or there is no profile, or it cannot be written.
    """
    profile, place = load_profile(None), default_profile_path()
    runs, known = _new_runs(profile, reports)
    found = calibrate(profile, list(runs.values()))
    backup = None
    if runs and not dry_run:
        backup = save_profile(profile, place.with_name(f"{place.stem}-{profile.fingerprint()}{place.suffix}"))
        save_profile(_noted(found.machine, tuple(runs)), place)
    return Calibration(
        profile=str(place),
        backup=None if backup is None else str(backup),
        reports=len(runs),
        known=known,
        corrections=found.corrections if runs else (),
    )


def _new_runs(profile: MachineProfile, reports: Sequence[Path]) -> tuple[dict[str, Performed], tuple[str, ...]]:
    """What each report that is new to the profile says was performed, by the report's fingerprint; and the files of the others."""
    runs: dict[str, Performed] = {}
    known: list[str] = []
    for path in reports:
        report = read_value(RunReport, path, "report")
        theirs, ours = report.machine.name, profile.name
        if theirs != ours:
            raise StatedError(f"The report {path} is of a run by the profile of {theirs!r}, and this machine's is of {ours!r}.")
        if report.emulated or report.performed is None:
            raise StatedError(f"The report {path} does not tell what was performed: make it anew with `lmoffload run --report`.")
        mark = report.fingerprint()
        if mark in profile.calibrated_with or mark in runs:
            known.append(str(path))
        else:
            runs[mark] = report.performed
    return runs, tuple(known)


def _noted(machine: MachineProfile, marks: tuple[str, ...]) -> MachineProfile:
    """The profile with the reports in it noted."""
    marks = (*machine.calibrated_with, *marks)
    measured, _, _ = machine.provenance.partition("; calibrated ")
    plural = "" if len(marks) == 1 else "s"
    provenance = f"{measured}; calibrated {datetime.date.today().isoformat()} with {len(marks)} run{plural}"
    return machine.model_copy(update={"provenance": provenance, "calibrated_with": marks})
