"""A whole profile, with very little time and with the time of the quick one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lmoffload.kernels.linear import kernels_for
from lmoffload.profiler.apart import profile_apart
from lmoffload.profiler.profile_machine import SHARES, thread_counts
from lmoffload.profiler.progress import Clock, Progress
from lmoffload_solver.formats import FORMATS, QUANTIZED
from lmoffload_solver.machine import MachineProfile


def test_a_profile_in_very_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told: list[Progress] = []
    measured = profile_apart(quick=True, disk_path=tmp_path, on_progress=told.append, formats=("bf16", "int8"), budget_s=3.0)
    assert [name for name in os.listdir(tmp_path) if "lmoffload" in name] == []
    assert MachineProfile.model_validate_json(measured.model_dump_json()) == measured
    assert {(curve.kernel, curve.format) for curve in measured.linear} == {
        (kernel, name) for name in ("bf16", "int8") for kernel in kernels_for(name)
    }
    assert {(rate.work, rate.format) for rate in measured.rates} == {(w, name) for w in ("quantize", "dequantize") for name in QUANTIZED}
    pairs = [(pair.first, pair.second, pair.format) for pair in measured.contention]
    assert pairs[:2] == [("disk_read", "host_compute", name) for name in ("bf16", "int4-g64")]
    assert {(first, second) for first, second, _ in pairs[2:]} == {("copy", "host_compute")}
    assert {curve.phase for curve in measured.attention} == {"prefill", "decode"}
    assert {curve.threads for curve in measured.linear} == set(thread_counts(measured.host.cores, quick=True))
    assert all(curve.flops_per_s.x[0] == 1 for curve in measured.linear)
    assert set(measured.overheads.linear_call_s) == {pool for pool in measured.overheads.linear_call_s if pool >= 1}
    assert min(measured.overheads.linear_call_s.values()) > 0
    # torch alone is more than 100 MB; a model that is next to nothing less than 2 GB.
    assert 100e6 < measured.base_bytes < 2e9
    assert "quick" in measured.provenance
    assert told[0].index == 0
    assert told[-1] == Progress("done", len(SHARES), len(SHARES), told[-1].elapsed_s, 0.0)
    assert [p.index for p in told] == sorted(p.index for p in told)


@pytest.mark.slow
def test_the_quick_profile_takes_less_than_a_minute(tmp_path: Path) -> None:
    begin = time.perf_counter()
    measured = profile_apart(quick=True, disk_path=tmp_path)
    assert time.perf_counter() - begin < 60
    assert {curve.format for curve in measured.linear} == {*FORMATS, *QUANTIZED}


def test_importing_the_profiler_loads_no_torch() -> None:
    code = "import sys, lmoffload.profiler, lmoffload.profiler.store; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_thread_counts() -> None:
    assert thread_counts(1, quick=True) == (1,)
    assert thread_counts(2, quick=False) == (1, 2)
    assert thread_counts(12, quick=True) == (1, 6, 12)
    assert thread_counts(12, quick=False) == (1, 2, 4, 8, 12)


def test_a_clock_shares_what_is_left() -> None:
    clock = Clock(10.0, {"a": 1.0, "b": 1.0, "c": 2.0})
    assert clock.start("a") == pytest.approx(2.5, rel=0.01)
    assert clock.start("b") == pytest.approx(10 / 3, rel=0.01)
    assert clock.start("c") == pytest.approx(10.0, rel=0.01)
