"""The safetensors header is hostile input: whatever it holds, the reader answers with tensors inside the file or one stated sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from lmoffload.checkpoint.safetensors_header import read_header
from lmoffload_solver.errors import StatedError


def write(path: Path, header: object, num_bytes: int = 0, header_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_offsets_give_the_bytes_that_the_library_gives(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
        "vector": np.arange(5, dtype=np.float16),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 3), dtype=np.float32),
    }
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = load_file(path)
    sources = read_header(path)
    assert set(sources) == set(loaded)
    for name, source in sources.items():
        data = np.fromfile(source.file, np.uint8, source.num_bytes, offset=source.offset_bytes)
        assert data.tobytes() == loaded[name].tobytes()
        assert source.shape == loaded[name].shape
    assert {name: source.format for name, source in sources.items()} == {
        "matrix": "fp32",
        "vector": "fp16",
        "scalar": "I64",
        "empty": "fp32",
    }


@pytest.mark.parametrize(
    ("header", "num_bytes", "said"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "'b' overlaps"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, 20, "'b' leaves a hole"),
        ({"a": entry("F32", [2], 0, 4)}, 4, "does not take the 4 bytes"),
        ({"a": entry("F99", [2], 0, 8)}, 8, "unknown dtype 'F99'"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, "no valid shape"),
        ({"a": entry("F32", [True, 2], 0, 8)}, 8, "no valid shape"),
        ({"a": entry("F32", [1] * 9, 0, 4)}, 4, "no valid shape"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "no valid data_offsets"),
        ({"a": entry("F32", [2], -8, 0)}, 8, "no valid data_offsets"),
        ({"a": entry("F32", [2**62, 2**62], 0, 8)}, 8, "does not take"),
        ({"a": 3}, 0, "not described by an object"),
        ([], 0, "not a JSON object"),
        (b'{"a": {}, "a": {}}', 0, "a name stands twice"),
        (b"{nonsense", 0, "not JSON"),
        (b"\xff\xfe{}", 0, "not UTF-8"),
        (b"[" * 100_000, 0, "nested too deep"),
        ({"a": entry("F32", [2], 0, 8)}, 9, "accounts for"),
    ],
)
def test_what_is_not_valid_is_said(tmp_path: Path, header: object, num_bytes: int, said: str) -> None:
    with pytest.raises(StatedError, match=said) as caught:
        read_header(write(tmp_path / "a.safetensors", header, num_bytes))
    assert str(caught.value).count(". ") == 0
    assert "\n" not in str(caught.value)


def test_a_short_file_is_told_with_expected_and_actual_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": entry("F32", [100], 0, 400)}, 400)
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 200)
    with pytest.raises(StatedError, match=rf"a\.safetensors is cut short: {whole} bytes expected, {whole - 200} bytes found"):
        read_header(path)


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    with pytest.raises(StatedError, match="cut short: its header alone takes 1008 bytes, the file has 10"):
        read_header(write(tmp_path / "a.safetensors", {}, 0, 1000))
    with pytest.raises(StatedError, match="its header would have 9223372036854775807 bytes"):
        read_header(write(tmp_path / "b.safetensors", {}, 0, 2**63 - 1))
    (tmp_path / "c.safetensors").write_bytes(b"abc")
    with pytest.raises(StatedError, match="it has 3 bytes"):
        read_header(tmp_path / "c.safetensors")


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(StatedError, match="Git LFS pointer"):
        read_header(path)


VALID = json.dumps({"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}).encode()
KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "x"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "BF16", "dtype"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def check_hostile(path: Path) -> None:
    try:
        sources = read_header(path)
    except StatedError:
        return
    for source in sources.values():
        assert source.num_bytes >= 0
        assert 0 <= source.offset_bytes <= source.offset_bytes + source.num_bytes <= path.stat().st_size


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, len(VALID) + 39), st.integers(0, 255)), max_size=4), cut=st.integers(0, 60))
def test_mutated_bytes_give_tensors_in_the_file_or_a_stated_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(len(VALID).to_bytes(8, "little") + VALID + bytes(32))
    for position, value in changes:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(data[: len(data) - cut])
    check_hostile(path)


@settings(max_examples=300, deadline=None)
@given(header=st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4), num_bytes=st.integers(0, 64))
def test_any_json_gives_tensors_in_the_file_or_a_stated_error(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, object], num_bytes: int
) -> None:
    check_hostile(write(tmp_path_factory.getbasetemp() / "any.safetensors", header, num_bytes))
