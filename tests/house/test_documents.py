"""Documents are written whole or not at all, and never over what a slip would lose."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lmoffload.documents import check_place, require_distinct, write_whole
from lmoffload.errors import StatedError, UsageError


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", "a", "plan")
    write_whole(tmp_path / "link", "b", "plan")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text(encoding="utf-8") == "b"
    assert {path.name for path in tmp_path.iterdir()} == {"link", "target"}


def test_what_is_no_regular_file_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text", "report")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo(), "a device or pipe is never replaced by a file"


def test_nothing_is_left_of_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan").write_text("old", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StatedError, match=r"plan .*plan cannot be written: No space left on device\."):
        write_whole(tmp_path / "plan", "new", "plan")
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {"plan": "old"}


def test_a_power_cut_leaves_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are on the disk before the name is theirs, and the name before the call returns."""
    done: list[object] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        sync(descriptor)
        status = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)

    def named(*places: Path) -> None:
        replace(*places)
        done.append("named")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    write_whole(tmp_path / "plan", "1234", "plan")
    assert done == [4, "named", "folder"]


def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, word in ((tmp_path, "is a folder"), (Path(""), "is a folder"), (tmp_path / "no" / "x", "does not exist")):
        with pytest.raises(StatedError, match=word):
            check_place(path, "plan")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(StatedError, match="read-only"):
        check_place(tmp_path / "x", "plan")


def test_one_file_for_two_options_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    a, b, link = tmp_path / "a", tmp_path / "b", tmp_path / "link"
    require_distinct([("--out", a), ("--report", b)], [("--input", None)])
    require_distinct([("--out", Path(os.devnull)), ("--report", Path(os.devnull))], [])
    with pytest.raises(UsageError, match="--out and --report"):
        require_distinct([("--out", a), ("--report", link)], [])
    with pytest.raises(UsageError, match="--input and --out"):
        require_distinct([("--out", tmp_path / "." / "a")], [("--input", a)])
