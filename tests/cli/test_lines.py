"""Job files: every line gives exactly one result, a bad one included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload.errors import StatedError
from lmoffload.jobs.lines import BadLine, JobLine, line_of_prompt, read_lines


def _read(tmp_path: Path, *lines: bytes) -> tuple[JobLine | BadLine, ...]:
    file = tmp_path / "job.jsonl"
    file.write_bytes(b"\n".join(lines))
    return read_lines(file)


def test_ids_and_options(tmp_path: Path) -> None:
    lines = _read(
        tmp_path,
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"id": "x", "messages": [{"role": "user", "content": "b"}], "max_new_tokens": 5, "seed": 1, "temperature": 0.5, "stop": "."}\r',
        b'{"prompt": "c", "stop": ["1", "2"]}',
        b"",
    )
    assert [line.id for line in lines] == ["1", "x", "3"]
    first, second, third = lines
    assert isinstance(first, JobLine)
    assert first.prompt == "a"
    assert isinstance(second, JobLine)
    assert (second.max_new_tokens, second.seed, second.temperature, second.stop) == (5, 1, 0.5, (".",))
    assert isinstance(third, JobLine)
    assert third.stop == ("1", "2")


@pytest.mark.parametrize(
    ("line", "line_id", "reason"),
    [
        (b"{", "2", "Line 2 is not valid: "),
        (b"[]", "2", "Line 2 is not valid: "),
        (b"", "2", "Line 2 is empty."),
        (b'{"id": "q", "prompt": "\xff"}', "2", "Line 2 is not UTF-8 text."),
        (b'{"id": "q"}', "q", "either prompt or messages must be there, and not both"),
        (b'{"id": "q", "prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "q", "not both"),
        (b'{"id": "q", "messages": []}', "2", "messages: "),
        (b'{"id": "q", "prompt": 3}', "2", "prompt: "),
        (b'{"id": 7, "prompt": "a"}', "2", "id: "),
        (b'{"prompt": "a", "max_new_tokens": 0}', "2", "max_new_tokens: "),
        (b'{"prompt": "a", "temperature": -1}', "2", "temperature: "),
        (b'{"prompt": "a", "stop": ""}', "2", "stop: a stop string is empty"),
        (b'{"prompt": "a", "max_tokens": 5}', "2", "max_tokens: "),
        (b'{"messages": [{"role": "robot", "content": "b"}]}', "2", "messages.0.role: "),
    ],
)
def test_a_bad_line_has_its_error_and_the_others_run(tmp_path: Path, line: bytes, line_id: str, reason: str) -> None:
    lines = _read(tmp_path, b'{"prompt": "a"}', line, b'{"prompt": "c"}')
    bad = lines[1]
    assert isinstance(bad, BadLine)
    assert bad.id == line_id
    assert reason in bad.error
    assert bad.error.endswith(".")
    assert "\n" not in bad.error
    assert isinstance(lines[0], JobLine)
    assert isinstance(lines[2], JobLine)


def test_one_id_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StatedError, match="uses the id 'a' twice, in lines 1 and 3"):
        _read(tmp_path, b'{"id": "a", "prompt": "x"}', b'{"prompt": "y"}', b'{"id": "a", "prompt": "z"}')
    with pytest.raises(StatedError, match="uses the id '2' twice, in lines 1 and 2"):
        _read(tmp_path, b'{"id": "2", "prompt": "x"}', b'{"prompt": "y"}')


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StatedError, match="has no lines"):
        _read(tmp_path, b"")
    with pytest.raises(StatedError, match="cannot be read: No such file"):
        read_lines(tmp_path / "absent")
    with pytest.raises(StatedError, match="cannot be read: Is a directory"):
        read_lines(tmp_path)


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), min_size=1, max_size=5))
def test_any_bytes_give_one_result_a_line(tmp_path_factory: pytest.TempPathFactory, raw: list[bytes]) -> None:
    file = tmp_path_factory.mktemp("job") / "job.jsonl"
    file.write_bytes(b"\n".join([b'{"prompt": "first"}', *raw, b'{"prompt": "last"}\n']))
    assert len(read_lines(file)) == len(raw) + 2


@given(st.text(min_size=1, max_size=20))
def test_prompts_come_through_unchanged(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    file = tmp_path_factory.mktemp("job") / "job.jsonl"
    file.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
    (line,) = read_lines(file)
    assert isinstance(line, JobLine)
    assert line.prompt == prompt


def test_prompts_from_python() -> None:
    chat = line_of_prompt("1", [{"role": "user", "content": "a"}])
    assert isinstance(chat, JobLine)
    assert chat.messages is not None
    bad = line_of_prompt("2", [{"role": "user"}])
    assert isinstance(bad, BadLine)
    assert "messages.0.content" in bad.error
