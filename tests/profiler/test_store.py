"""Profiles kept and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmoffload.profiler import store
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import Disk, HostLimits, MachineProfile, Overheads, Processor


def a_profile() -> MachineProfile:
    return MachineProfile(
        name="toy",
        provenance="made by hand",
        host=HostLimits(
            memory_total_bytes=2,
            memory_usable_bytes=1,
            memory_limited_by="physical",
            cores=1,
            cores_limited_by="physical",
            last_level_cache_bytes=0,
        ),
        processors=(Processor(tier="host", name="toy", cores=1),),
        memory=(),
        disks=(Disk(file_system="/", device="toy", read=(), direct=True, cache_excluded=True, free_bytes=0),),
        linear=(),
        attention=(),
        overheads=Overheads(layer_s=0, step_s=0, row_s=0, linear_call_s={1: 0}, elementwise_bytes_per_s=1, random_read_s=0),
        base_bytes=1,
    )


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_round_trip_to_the_default_place() -> None:
    with pytest.raises(StatedError, match="no profile yet"):
        store.load_profile()
    path = store.save_profile(a_profile())
    assert path == store.default_profile_path()
    assert store.load_profile() == a_profile()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_round_trip_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "with spaces" / "m.json"
    store.save_profile(a_profile(), path)
    assert store.load_profile(path) == store.load_profile(str(path)) == a_profile()


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1}', '{"schema_version": 7}', "[]"])
def test_an_invalid_file_is_one_sentence_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(StatedError) as caught:
        store.load_profile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(a_profile().model_dump_json().replace('"name":"toy"', '"name":"toy","colour":"red"', 1))
    with pytest.raises(StatedError, match="colour"):
        store.load_profile(path)


def test_a_missing_file_and_an_unknown_name() -> None:
    with pytest.raises(StatedError, match=r"nowhere\.json cannot be read"):
        store.load_profile("nowhere.json")
    with pytest.raises(StatedError, match="neither a file nor one of the packaged"):
        store.load_profile("no-such-machine")


def test_a_packaged_profile_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lmoffload_solver_like"
    (package / "profiles").mkdir(parents=True)
    (package / "profiles" / "toy-box.json").write_text(a_profile().model_dump_json())
    monkeypatch.setattr(store.resources, "files", lambda _name: package)
    assert store.load_profile("toy-box") == a_profile()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StatedError, match="cannot be written"):
        store.save_profile(a_profile(), tmp_path / "file" / "m.json")


def test_an_invalid_profile_of_this_machine_says_how_to_make_it_anew() -> None:
    path = store.save_profile(a_profile())
    path.write_text("{}")
    with pytest.raises(StatedError, match="run `lmoffload profile` to measure this machine anew"):
        store.load_profile()
