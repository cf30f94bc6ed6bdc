"""Prompts from CSV and Parquet, results as CSV and Parquet: as with lines, in the input's order, and gone on with after any end."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lmoffload.errors import StatedError
from lmoffload.jobs import tables
from lmoffload.jobs.lines import BadLine, JobLine, read_lines
from tests.cli.conftest import Call, files_below

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "The sea,\n\"is\"", "max_new_tokens": 9, "stop": ["qq", "zz"]},
    {"id": "b", "prompt": "NA", "max_new_tokens": 2, "temperature": 0.5, "seed": 3, "stop": None},
    {"id": "c", "messages": [{"role": "user", "content": "Ünd?"}], "max_new_tokens": 4},
    {"id": "d", "prompt": "007", "max_new_tokens": 3, "top_k": 1, "stop": ["5"]},
]  # fmt: skip
NUL = "\ue000"
COLUMNS = tuple(dict.fromkeys(name for row in ROWS for name in row))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a file of the kind that its name says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([{name: row.get(name) for name in COLUMNS} for row in rows]), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows)
    else:
        path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The results in a file, as the lines say them."""
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    if path.suffix == ".csv":
        text = path.read_bytes().decode().replace("\0", NUL)  # Python 3.10's reader refuses it
        return [
            {name: cell.replace(NUL, "\0") for name, cell in row.items()}
            | {name: json.loads(row[name]) for name in ("token_ids", "prompt_tokens")}
            | {"error": row["error"] or None}
            for row in csv.DictReader(io.StringIO(text, newline=""))
        ]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_rows_are_lines(tmp_path: Path, suffix: str) -> None:
    """Every kind of cell; text that looks like a number or like nothing stays text."""
    assert read_lines(write(tmp_path / f"t{suffix}", ROWS)) == read_lines(write(tmp_path / "t.jsonl", ROWS))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_in_and_out(call: Call, profiled: Path, model: Path, suffix: str) -> None:
    """The results of a table are those of its lines, in the input's order; going on leaves what is finished as it was."""
    plain, table, output = write(Path("job.jsonl"), ROWS), write(Path(f"job{suffix}"), ROWS), Path(f"out{suffix}")
    assert call("run", model, "--input", plain, "--output", "out.jsonl").code == 0
    expected = {row["id"]: row for row in read(Path("out.jsonl"))}
    arguments = ("run", model, "--input", table, "--output", output)
    assert call(*arguments).code == 0
    assert read(output) == [expected[row["id"]] for row in ROWS]
    whole, lines = output.read_bytes(), Path(f"out{suffix}.jsonl")
    kept = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(kept[0] + kept[1][:9])
    output.unlink()
    assert f"Going on with {lines}: 1 of 4" in call(*arguments).err
    assert lines.read_bytes().startswith(kept[0]) and sorted(lines.read_bytes().splitlines(keepends=True)) == sorted(kept)
    assert output.read_bytes() == whole
    output.unlink()
    assert call(*arguments).code == 0 and output.read_bytes() == whole, "killed before the table was written"
    lines.unlink()
    refused = call(*arguments)
    assert refused.code == 1 and "--restart" in refused.sentence and output.read_bytes() == whole and not lines.exists()
    assert not [path for path in files_below(Path.cwd()) if path.suffix == ".part"]


def test_failed_rows_and_log_probabilities(call: Call, profiled: Path, model: Path) -> None:
    """A row that fails has its error; it has no log-probabilities, and comes before those that have."""
    rows = [ROWS[0] | {"prompt": None}, *ROWS[1:]]
    job = write(Path("job.csv"), rows)
    assert call("run", model, "--input", job, "--output", "out.parquet", "--logprobs").code == 1
    first, *others = read(Path("out.parquet"))
    assert first["error"] == "Row 1 is not valid: either prompt or messages must be there, and not both."
    assert (first["finish_reason"], first["token_ids"], first["log_probabilities"]) == ("error", [], None)
    assert [len(row["log_probabilities"]) for row in others] == [len(row["token_ids"]) for row in others]
    write(job, ROWS)
    assert "another input" in call("run", model, "--input", job, "--output", "out.parquet", "--logprobs").sentence


def test_tables_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    for text, word in (
        (b"", "has no column named prompt or messages; its columns are none"),
        (b"question,answer\n1,2\n", "its columns are question, answer"),
        (b"prompt,prompt\na,b\n", "two columns 'prompt'"),
        (b"id,prompt\na,b\nc\n", "Row 2 of the table .* has 1 cells, and its header 2"),
        (b'prompt\n"a\n', "cannot be read: unexpected end of data"),
        (b"prompt\n\xff\n", "it is not UTF-8 text"),
        (b"prompt\n", "has no rows"),
        (b"id,prompt\na,b\na,c\n", "uses the id 'a' twice, in rows 1 and 2"),
    ):
        file.write_bytes(text)
        with pytest.raises(StatedError, match=word):
            read_lines(file)
    with pytest.raises(StatedError, match="No such file"):
        read_lines(tmp_path / "none.csv")
    odd = tmp_path / "t.parquet"
    odd.write_bytes(b"PAR1 is how it begins")
    with pytest.raises(StatedError, match="cannot be read: "):
        read_lines(odd)
    parquet.write_table(pyarrow.table({"prompt": [b"bytes"]}), odd)
    with pytest.raises(StatedError, match="holds a bytes"):
        read_lines(odd)
    parquet.write_table(
        pyarrow.table({"id": [7, 8], "prompt": ["a", None], "top_p": [float("nan"), 0.5], "__index_level_0__": [4, 5]}), odd
    )
    first, second = read_lines(odd)
    assert isinstance(first, JobLine) and (first.id, first.top_p) == ("7", None)
    assert isinstance(second, BadLine) and second.id == "8"


def test_without_the_library(call: Call, profiled: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    for arguments in (("plan", model, "--input", "a.parquet"), ("run", model, "--num-prompts", "2", "--output", "b.parquet")):
        shown = call(*arguments)
        assert shown.code == 1 and "pip install 'lmoffload[tables]'" in shown.sentence
