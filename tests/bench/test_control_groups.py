"""Control groups, real ones where there is the right to make them, and both versions in a tree of plain files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lmoffload.bench.control_groups import ControlGroups, NoGroupsError, disk_number
from lmoffload.bench.program import run_program
from lmoffload.environment import environment_of_child
from lmoffload_solver.comparison import Granted

GRANTED = Granted(memory_bytes=2**30, read_bytes_per_s=500_000_000, cores=(0, 1))


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree(root: Path, memberships: str, mounts: str) -> Path:
    """What /proc and /sys would hold, with a disk for the files of the tree itself."""
    write(root / "proc/self/cgroup", memberships)
    write(root / "proc/self/mountinfo", mounts)
    number = os.stat(root).st_dev
    write(root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}/dev", "8:16\n")
    return root


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    mounts = "".join(
        f"3{n} 24 0:2{n} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n" for n, name in enumerate(("memory", "blkio", "cpuset"))
    )
    root = tree(tmp_path / "v1", "3:memory:/box\n2:blkio:/\n1:cpuset:/\n", mounts)
    for name in ("memory/box", "blkio", "cpuset"):
        (root / "sys/fs/cgroup" / name).mkdir(parents=True)
    write(root / "sys/fs/cgroup/cpuset/cpuset.effective_mems", "0\n")
    return root


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    root = tree(tmp_path / "v2", "0::/box\n", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    top = root / "sys/fs/cgroup"
    write(top / "cgroup.controllers", "cpuset cpu io memory pids\n")
    write(top / "cgroup.subtree_control", "cpuset io memory\n")
    write(top / "box/cgroup.controllers", "\n")
    return root


def test_version_1_has_a_group_for_each_controller(version_1: Path, tmp_path: Path) -> None:
    groups = ControlGroups.open(GRANTED, [tmp_path], version_1)
    top, name = version_1 / "sys/fs/cgroup", f"lmoffload-compare-{os.getpid()}"
    memory, disk, cores = top / "memory/box" / name, top / "blkio" / name, top / "cpuset" / name
    assert (memory / "memory.limit_in_bytes").read_text() == str(2**30)
    assert (memory / "memory.memsw.limit_in_bytes").read_text() == str(2**30)
    assert (disk / "blkio.throttle.read_bps_device").read_text() == "8:16 500000000"
    assert ((cores / "cpuset.mems").read_text(), (cores / "cpuset.cpus").read_text()) == ("0\n", "0,1")
    assert groups.entrances == (memory / "cgroup.procs", disk / "cgroup.procs", cores / "cgroup.procs")
    write(memory / "memory.usage_in_bytes", "5\n")
    write(memory / "memory.max_usage_in_bytes", "7\n")
    write(memory / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    write(disk / "blkio.throttle.io_service_bytes", "8:16 Read 100\n8:16 Write 50\n8:32 Read 11\nTotal 161\n")
    assert (groups.memory_now(), groups.memory_peak(), groups.kills(), groups.bytes_read()) == (5, 7, 3, 111)


def test_version_2_has_one_group_below_the_nearest_that_may(version_2: Path, tmp_path: Path) -> None:
    groups = ControlGroups.open(GRANTED, [tmp_path], version_2)
    group = version_2 / "sys/fs/cgroup" / f"lmoffload-compare-{os.getpid()}"
    assert groups.entrances == (group / "cgroup.procs",)
    written = {name: (group / name).read_text() for name in ("memory.max", "memory.swap.max", "io.max", "cpuset.cpus")}
    assert written == {"memory.max": str(2**30), "memory.swap.max": "0", "io.max": "8:16 rbps=500000000", "cpuset.cpus": "0,1"}
    write(group / "memory.events", "low 0\nmax 9\noom 1\noom_kill 2\n")
    write(group / "io.stat", "8:16 rbytes=100 wbytes=5 rios=1\n8:32 rbytes=20 wbytes=0\n")
    assert (groups.kills(), groups.bytes_read(), groups.memory_peak()) == (2, 120, None)


def test_version_2_asks_for_controllers_that_children_do_not_have(version_2: Path, tmp_path: Path) -> None:
    control = version_2 / "sys/fs/cgroup/cgroup.subtree_control"
    control.write_text("")
    ControlGroups.open(Granted(memory_bytes=1), [tmp_path], version_2)
    assert control.read_text() == "+io"  # a file keeps the last of "+memory" and "+io"; the kernel adds them up


def test_a_machine_without_controllers_is_told(tmp_path: Path) -> None:
    root = tree(tmp_path / "bare", "0::/\n", "")
    with pytest.raises(NoGroupsError, match="neither version has the controller memory"):
        ControlGroups.open(Granted(), [tmp_path], root)


def test_what_a_group_is_refused_is_told(version_1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(NoGroupsError, match="this needs root"):
        ControlGroups.open(Granted(), [tmp_path], version_1)


def test_a_real_group_limits_and_ends_what_is_left_in_it(tmp_path: Path) -> None:
    try:
        groups = ControlGroups.open(Granted(memory_bytes=64 * 2**20, read_bytes_per_s=100_000_000, cores=(0,)), [tmp_path])
    except NoGroupsError as error:
        pytest.skip(str(error))
    directories = [directory for _, directory in groups.directories.values()]
    with groups:
        script = "sleep 300 & echo $! > left; grep Cpus_allowed_list /proc/self/status"
        done = run_program(["sh", "-c", f"cd {tmp_path}; {script}"], environment_of_child({}), groups, tmp_path / "log", 30.0)
        assert done.code == 0
        assert done.last_words.split() == ["Cpus_allowed_list:", "0"]
    left = (tmp_path / "left").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", left], capture_output=True, text=True, check=False).stdout.strip()
    assert not state or state.startswith("Z")
    assert not any(directory.exists() for directory in directories)
    assert disk_number(tmp_path).partition(":")[2].isdigit()
