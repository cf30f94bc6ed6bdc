"""Limits read from fake /proc and /sys trees (cases M1 and M2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmoffload.profiler.limits import allowed_processors, disk_of, last_level_cache_bytes, memory_of_process, read_limits

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """64 GiB, 40 of them available, 8 cores without siblings, no limits."""
    write(tmp_path, {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\nSwapFree: {99 << 20} kB"})
    write(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t0-7\nRssAnon:\t1024 kB", "sys/devices/system/cpu/online": "0-7"})
    for cpu in range(8):
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        write(tmp_path, {f"{folder}/topology/core_id": str(cpu), f"{folder}/topology/physical_package_id": "0"})
    return tmp_path


def test_without_limits_what_is_available_is_usable(machine: Path) -> None:
    limits = read_limits(machine)
    assert (limits.memory_total_bytes, limits.memory_usable_bytes, limits.memory_limited_by) == (64 * GIB, 40 * GIB, "physical")
    assert (limits.cores, limits.cores_limited_by) == (8, "physical")


def test_files_missing_altogether(tmp_path: Path) -> None:
    limits = read_limits(tmp_path)
    assert limits.memory_usable_bytes == limits.memory_total_bytes > 0
    assert limits.cores >= 1


@pytest.mark.parametrize(
    ("maximum", "current", "stat", "usable"),
    [
        ("max", 30 * GIB, f"inactive_file {20 * GIB}\nactive_file 0", 40 * GIB),
        # 24 GiB limit, 22 in use of which 20 are file cache: 2 are held, 22 are left.
        (str(24 * GIB), 22 * GIB, f"file {20 * GIB}\nshmem 0\ninactive_file {15 * GIB}\nactive_file {5 * GIB}", 22 * GIB),
        # tmpfs pages are counted as file but are not given back.
        (str(24 * GIB), 22 * GIB, f"file {20 * GIB}\nshmem {20 * GIB}\ninactive_file 0\nactive_file 0", 2 * GIB),
        (str(24 * GIB), 22 * GIB, f"anon {1 * GIB}\nslab_reclaimable {1 * GIB}", 3 * GIB),
        (str(100 * GIB), 0, "anon 0", 40 * GIB),
    ],
)
def test_version_2(machine: Path, maximum: str, current: int, stat: str, usable: int) -> None:
    write(machine, {"proc/self/cgroup": "0::/user/job", "sys/fs/cgroup/cgroup.controllers": "cpu memory"})
    group = "sys/fs/cgroup/user/job"
    write(machine, {f"{group}/memory.max": maximum, f"{group}/memory.current": str(current), f"{group}/memory.stat": stat})
    assert read_limits(machine).memory_usable_bytes == usable


def test_the_tightest_ancestor_counts(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/user/job", "sys/fs/cgroup/cgroup.controllers": "cpu memory"})
    write(machine, {"sys/fs/cgroup/user/job/memory.max": str(30 * GIB), "sys/fs/cgroup/user/job/memory.current": "0"})
    write(machine, {"sys/fs/cgroup/user/memory.max": str(10 * GIB), "sys/fs/cgroup/user/memory.current": str(4 * GIB)})
    limits = read_limits(machine)
    assert (limits.memory_usable_bytes, limits.memory_limited_by) == (6 * GIB, "cgroup v2 /user")


def test_version_2_throttling_limit(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.high": str(3 * GIB), "sys/fs/cgroup/job/memory.max": "max"})
    assert read_limits(machine).memory_usable_bytes == 3 * GIB


def hybrid(root: Path) -> None:
    """Version 1 for the controllers, an empty version 2 beside it."""
    write(root, {"proc/self/cgroup": "4:memory:/a/b\n1:cpu,cpuacct:/c\n0::/"})
    mounts = [
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    ]
    write(root, {"proc/self/mountinfo": "\n".join(mounts), "sys/fs/cgroup/unified/cgroup.controllers": ""})


def test_version_1_in_a_hybrid_machine(machine: Path) -> None:
    hybrid(machine)
    memory = "sys/fs/cgroup/memory"
    write(machine, {f"{memory}/memory.limit_in_bytes": NO_LIMIT_V1, f"{memory}/a/memory.limit_in_bytes": str(8 * GIB)})
    stat = f"active_file 0\ninactive_file 0\ntotal_active_file {1 * GIB}\ntotal_inactive_file {1 * GIB}"
    write(machine, {f"{memory}/a/memory.usage_in_bytes": str(5 * GIB), f"{memory}/a/memory.stat": stat})
    write(machine, {f"{memory}/a/b/memory.limit_in_bytes": NO_LIMIT_V1, f"{memory}/a/b/memory.usage_in_bytes": "0"})
    limits = read_limits(machine)
    assert (limits.memory_usable_bytes, limits.memory_limited_by) == (5 * GIB, "cgroup v1 /a")


def test_a_container_that_sees_only_its_own_part(machine: Path) -> None:
    write(machine, {"proc/self/cgroup": "4:memory:/docker/abc", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB)})
    write(machine, {"proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"})
    write(machine, {"sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB)})
    assert read_limits(machine).memory_usable_bytes == GIB


@pytest.mark.parametrize(("quota", "cores"), [("400000 100000", 4), ("765000 100000", 7), ("50000 100000", 1), ("max 100000", 8)])
def test_quota_of_version_2(machine: Path, quota: str, cores: int) -> None:
    write(machine, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": quota})
    assert read_limits(machine).cores == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 2)])
def test_quota_of_version_1(machine: Path, quota: str, cores: int) -> None:
    hybrid(machine)
    group = "sys/fs/cgroup/cpu,cpuacct/c"
    write(machine, {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": "100000"})
    limits = read_limits(machine)
    assert limits.cores == cores
    assert limits.cores_limited_by == ("physical" if cores == 8 else "quota of cgroup v1 /c")


def test_affinity_to_one_core(machine: Path) -> None:
    write(machine, {"proc/self/status": "Cpus_allowed_list:\t5"})
    limits = read_limits(machine)
    assert (limits.cores, limits.cores_limited_by) == (1, "affinity")


def test_96_visible_of_which_7_65_are_allowed(machine: Path) -> None:
    write(machine, {"proc/self/status": "Cpus_allowed_list:\t0-95", "sys/devices/system/cpu/online": "0-95"})
    write(machine, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "765000 100000"})
    assert read_limits(machine).cores == 7


def test_siblings_are_one_core(machine: Path) -> None:
    for cpu in range(8):
        write(machine, {f"sys/devices/system/cpu/cpu{cpu}/topology/core_id": str(cpu % 4)})
    assert read_limits(machine).cores == 4
    assert allowed_processors(machine) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_ulimits(machine: Path) -> None:
    rows = [("Max data size", str(5 * GIB)), ("Max locked memory", "65536"), ("Max address space", "unlimited")]
    lines = "".join(f"{name:<26}{soft:<21}unlimited            bytes\n" for name, soft in rows)
    write(machine, {"proc/self/limits": lines, "proc/self/status": f"Cpus_allowed_list:\t0-7\nVmData:\t{1 << 20} kB"})
    limits = read_limits(machine)
    assert (limits.memory_usable_bytes, limits.memory_limited_by, limits.page_locked_limit_bytes) == (4 * GIB, "ulimit", 65536)


def test_last_level_caches_are_summed_over_their_instances(machine: Path) -> None:
    for cpu in range(8):
        cache = f"sys/devices/system/cpu/cpu{cpu}/cache"
        write(machine, {f"{cache}/index2/level": "2", f"{cache}/index2/type": "Unified", f"{cache}/index2/size": "512K"})
        write(machine, {f"{cache}/index3/level": "3", f"{cache}/index3/type": "Unified", f"{cache}/index3/size": "32M"})
        write(machine, {f"{cache}/index3/shared_cpu_list": "0-3" if cpu < 4 else "4-7"})
    assert last_level_cache_bytes(machine) == 64 << 20


def test_what_the_process_holds_is_its_own_to_use(machine: Path) -> None:
    assert memory_of_process(machine) == read_limits(machine).memory_usable_bytes + (1 << 20)


def test_the_file_system_of_a_path_that_is_not_there(tmp_path: Path) -> None:
    system = disk_of(tmp_path / "not" / "yet")
    assert system.free_bytes > 0
    assert tmp_path.resolve().is_relative_to(system.mount_point)
