"""The disk measured for real on a scratch file (D1), and with direct I/O refused (D2)."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lmoffload.profiler import disk_target
from lmoffload.profiler.disk import measure_disk, read_disk
from lmoffload.profiler.scratch import CHUNK_BYTES, ScratchFile
from lmoffload_solver.errors import StatedError

BUDGET_S = 1.0
O_DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch files go where the test can see them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_disk_measured_twice_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = (read_disk(tmp_path, budget_s=BUDGET_S) for _ in range(2))
    assert os.listdir(tmp_path) == []
    for readings in (first, second):
        disk = readings.disk
        assert [curve.threads for curve in disk.read] == [1, 2, 4]
        assert disk.write
        assert all(rate > 0 for curve in disk.read for rate in curve.bytes_per_s.y)
        assert 0 < readings.random_read_s < 1
        assert tmp_path.resolve().is_relative_to(disk.file_system)
        # Unsure is said, never hidden.
        assert disk.cache_excluded or any("cache" in remark for remark in readings.remarks)


def refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & O_DIRECT == O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


def refuse_at_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refusing(call: Any) -> Any:
        def request(descriptor: int, *args: Any) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
                raise OSError(errno.EINVAL, "refused")
            return int(call(descriptor, *args))

        return request

    monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    monkeypatch.setattr(os, "pwritev", refusing(os.pwritev))


@pytest.mark.skipif(not O_DIRECT, reason="this system has no direct I/O to refuse")
@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_first_request])
def test_direct_io_refused_is_measured_buffered_with_a_remark(refuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    readings = read_disk(tmp_path, budget_s=BUDGET_S)
    assert not readings.disk.direct
    assert sum("refuses direct I/O" in remark for remark in readings.remarks) == 1
    assert len(readings.disk.read) == 3
    assert os.listdir(tmp_path) == []


def test_another_error_is_not_taken_for_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StatedError, match="No space left"):
        measure_disk(tmp_path, budget_s=BUDGET_S)
    assert os.listdir(tmp_path) == []


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    import mmap

    scratch = ScratchFile(tmp_path, 2 * CHUNK_BYTES)
    try:
        page = memoryview(mmap.mmap(-1, 4096))
        page[:5] = b"hello"
        scratch.write(CHUNK_BYTES, page)
        back = memoryview(mmap.mmap(-1, 4096))
        scratch.reader.read_into(back, CHUNK_BYTES)
        assert back == page
        assert scratch.num_bytes == 2 * CHUNK_BYTES
    finally:
        scratch.close()


def test_too_little_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_target, "FREE_SHARE", 1 << 40)
    with pytest.raises(StatedError, match=r"MB free"):
        measure_disk(tmp_path, budget_s=BUDGET_S)


def test_where_nothing_can_be_written_a_file_found_there_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "blobs" / "weights"
    model.parent.mkdir()
    model.write_bytes(os.urandom(3 * CHUNK_BYTES))
    os.sync()
    link = tmp_path / "snapshot" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(model)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    readings = read_disk(link.parent, budget_s=BUDGET_S)
    assert readings.disk.read
    assert readings.disk.write == ()
    assert any("cannot be written" in remark for remark in readings.remarks)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(StatedError, match="nothing can be written there"):
        measure_disk(empty, budget_s=BUDGET_S)
