"""`lmoffload doctor`: what is found, and what is said of it."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path

import pytest

from lmoffload.profiler.condition import Condition, Folder, read_condition
from lmoffload.profiler.diagnosis import KnownProfile, advise, known_profile
from lmoffload.profiler.store import save_profile
from lmoffload_solver.machine import HostLimits, Processor
from tests.cli.conftest import Call, files_below
from tests.cli.machines import machine

SOUND_PROFILE = KnownProfile(path="p", provenance="measured 2026-11-01 by lmoffload 0.1.0 (full)", age_days=3, changes=(), error=None)


def test_a_machine_without_a_profile(call: Call, home: Path, model: Path) -> None:
    before = files_below(home.parent)
    shown = call("doctor", model, "--json")
    assert shown.code == 0
    document = json.loads(shown.out)
    assert {folder["role"] for folder in document["condition"]["folders"]} == {"model", "current", "cache", "data"}
    assert document["condition"]["host"]["cores"] >= 1
    assert document["condition"]["versions"]["torch"]
    assert document["profile"]["provenance"] is None
    assert any("lmoffload profile" in sentence for sentence in document["advice"])
    assert files_below(home.parent) == before, "what was tried leaves nothing"


def test_tables(call: Call, profiled: Path) -> None:
    shown = call("doctor")
    assert shown.code == 0
    for word in ("instruction sets", "page-locked memory", "waiting threads", "cache", "made by hand", "no longer"):
        assert word in shown.out


def test_models_that_are_none(call: Call, home: Path) -> None:
    assert call("doctor", "nowhere").code == 1
    assert call("doctor", "shape:opt-30b").code == 2


def test_direct_reads_are_tried(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    memory = Path("/dev/shm")
    found = read_condition({"model": tmp_path, "memory": memory})
    assert found.folders[0].direct_reads in (True, False)
    assert found.folders[1].kind == "tmpfs"
    assert not list(memory.glob(".lmoffload-doctor-*"))


def test_a_limited_machine(tmp_path: Path) -> None:
    """A fake /proc and /sys: a group of 4 GiB, of which 1 is used, and one of two processors."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/cpuinfo").write_text("model name : Slow One\nflags : sse4_2\n")
    for name, text in (("memory.max", 4 << 30), ("memory.current", 1 << 30), ("cpu.max", "100000 100000")):
        (group / name).write_text(str(text))
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1")
    found = read_condition({}, tmp_path)
    assert (found.host.memory_usable_bytes, found.host.cores) == (3 << 30, 1)
    assert [(one.limit_bytes, one.room_bytes) for one in found.memory_groups] == [(4 << 30, 3 << 30)]
    told = " ".join(advise(found, SOUND_PROFILE))
    for word in ("3.00 GiB of 16.0 GiB by cgroup v2 /", "Only 1 of", "quota of cgroup v2 /", "no vector instructions"):
        assert word in told


def test_what_is_no_longer_as_measured(home: Path) -> None:
    condition = _condition()
    measured = {"provenance": "measured 2026-01-31 by lmoffload 0.1.0 (quick)", "versions": {"torch": "2.5"}}
    save_profile(machine(cores=4).model_copy(update=measured))
    profile = known_profile(condition, date(2026, 3, 1))
    assert profile.age_days == 29
    assert "it is of 4 cores, now there are 2" in profile.changes
    assert "torch was 2.5 and is 2.6" in profile.changes
    assert "run `lmoffload profile`" in " ".join(advise(condition, profile))


@pytest.mark.parametrize(
    ("profile", "word"),
    [
        ({"age_days": 400}, "400 days old"),
        ({"provenance": "measured 2026-11-01 by lmoffload 0.1.0 (quick)"}, "quick one"),
        ({"error": "The machine profile p is not valid."}, "not valid"),
    ],
)
def test_profiles(profile: dict[str, object], word: str) -> None:
    assert word in " ".join(advise(_condition(), SOUND_PROFILE.model_copy(update=profile)))


@pytest.mark.parametrize(
    ("folder", "word"),
    [
        ({"role": "cache", "writable": False}, "XDG_CACHE_HOME"),
        ({"role": "cache", "free_bytes": 1 << 20}, "1.00 MiB are free"),
        ({"role": "model", "direct_reads": False}, "Direct reads are refused"),
    ],
)
def test_folders(folder: dict[str, object], word: str) -> None:
    sound = Folder(
        role="current", path="/x", file_system="/", kind="ext4", device="d", free_bytes=1 << 40, writable=True, direct_reads=True
    )
    assert not list(advise(_condition(folders=(sound,)), SOUND_PROFILE)), "nothing is wrong"
    assert word in " ".join(advise(_condition(folders=(sound.model_copy(update=folder),)), SOUND_PROFILE))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"torch_error": "libtorch.so is not there"}, "libtorch.so is not there"),
        ({"gpus": ("A GPU",)}, "ulimit -l unlimited"),
        ({"thread_remarks": ("Threads may wait busily.",)}, "wait busily"),
    ],
)
def test_the_process(changes: dict[str, object], word: str) -> None:
    assert word in " ".join(advise(_condition(**changes), SOUND_PROFILE))


def _condition(**changes: object) -> Condition:
    host = HostLimits(
        memory_total_bytes=16 << 30, memory_usable_bytes=15 << 30, memory_limited_by="physical", cores=2, cores_limited_by="physical",
        page_locked_limit_bytes=8 << 20, last_level_cache_bytes=32 << 20,
    )  # fmt: skip
    sound = Condition(
        host=host, processor=Processor(tier="host", name="by hand", cores=2, instruction_sets=("avx2",)),
        logical_processors=os.cpu_count() or 1, memory_groups=(), versions={"torch": "2.6"}, torch_error=None, torch_threads=2,
        thread_remarks=(), gpus=(), folders=(),
    )  # fmt: skip
    return sound.model_copy(update=changes)
