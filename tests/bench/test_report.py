"""A comparison as people read it: medians with their spread, failures as what they are; and the page in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmoffload.report.comparison import comparison_tables, markdown_of, write_comparison
from lmoffload.report.comparison_page import page_of
from lmoffload.report.comparison_tables import tables_of
from lmoffload.report.flexllmgen import summaries
from lmoffload.report.tables import show
from lmoffload_solver.comparison import Comparison
from tests.bench.browser import browser, find_chromium
from tests.bench.comparisons import comparison, figures, row, run

FAULTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


def test_medians_and_spread() -> None:
    ours = comparison().systems[0].rows[0]
    assert ours.median("tokens_per_s") == pytest.approx(10.0)
    assert ours.spread("tokens_per_s") == pytest.approx((5.0, 10.0))
    assert ours.median("prefill_s") == pytest.approx(2.0)
    even = row("only", run(2, 2), run(4, 4))
    assert even.middle == even.runs[1]  # the slower of the two in the middle


def test_the_first_table_says_who_wins_and_what_failed() -> None:
    table = next(tables_of(comparison()))
    by_name = {cells[0]: cells for cells in table.rows}
    assert by_name["lmoffload"][2:5] == ("done", "10.0 (5.00–10.0)", "64.0 (32.0–128)")
    assert by_name["accelerate, default"][-1] == "5.00"
    assert by_name["accelerate, best"][-1] == "2.00"
    assert by_name["llama.cpp in 2.00 GiB"][-1] == "0.50"
    assert by_name["zero-inference"][2:4] == ("crashed", "–")
    assert by_name["airllm"][2:4] == ("not installed", "–")
    assert "Faster than lmoffload: llama.cpp in 2.00 GiB." in table.note
    assert "zero-inference: crashed: exit code 1: <b>no | room</b>" in table.note
    assert "airllm is not installed in /usr/bin/python3." in table.note


def test_a_row_that_failed_once_says_so_beside_its_figures() -> None:
    failed = run(1, 1).model_copy(update={"status": "over the memory limit", "sentence": "The kernel ended it.", "figures": None})
    changed = comparison().systems[0].model_copy(update={"rows": (row("only", run(2, 2), failed),)})
    cells = next(tables_of(comparison(systems=(changed,)))).rows[0]
    assert cells[2] == "over the memory limit in 1 of 2 runs" and cells[3] == "10.0"


def test_projected_figures_are_marked() -> None:
    projected = run(2, 2, status="projected", full=figures(2, 3))
    changed = comparison().systems[0].model_copy(update={"rows": (row("only", projected),)})
    tables = list(tables_of(comparison(systems=(changed,), measured_tokens=3)))
    assert tables[0].rows[0][2] == "projected"
    (projections,) = [table for table in tables if table.title == "Projections"]
    assert projections.rows == (("lmoffload", "4.00 s", "5.00 s", "-20.0 %"),)


def test_markdown_keeps_every_cell_in_its_place() -> None:
    text = markdown_of(comparison())
    assert "| accelerate | batch 4, threads default | crashed: exit code 1: <b>no \\| room</b> |" in text
    assert "repeat with: lmoffload compare 'a model'" in text
    assert text.splitlines()[2] == "Something is odd."


def test_the_terminal_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    show(comparison_tables(comparison()))
    out = capsys.readouterr().out
    assert "10.0 (5.00–10.0)" in out and "not installed" in out and "Something is odd." in out
    assert max(map(len, out.splitlines())) <= 140


def test_five_lines_as_flexllmgen_writes_them() -> None:
    """The text of `write_benchmark_log` with its own arguments for the same figures."""
    blocks = summaries(comparison()).split("# ")
    (own,) = [block for block in blocks if block.startswith("lmoffload\n")]
    assert own.splitlines()[1:] == [
        "model size: 2.000 GB\tcache size: 0.125 GB\thidden size (p): 0.062 GB",
        "peak gpu mem: 0.000 GB\tprojected: False",
        "prefill latency: 2.000 s\tprefill throughput: 64.000 token/s",
        "decode latency: 2.000 s\tdecode throughput: 16.000 token/s",
        "total latency: 4.000 s\ttotal throughput: 10.000 token/s",
    ]
    assert any(block.startswith("airllm: not installed") for block in blocks)
    assert any(block.startswith("zero-inference: crashed") for block in blocks)


def test_the_documents_are_written_whole(tmp_path: Path) -> None:
    write_comparison(comparison(), tmp_path / "new" / "folder")
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"comparison.html", "comparison.md", "comparison.json"}
    document = json.loads((tmp_path / "new/folder/comparison.json").read_text(encoding="utf-8"))
    assert document["schema"] == 1
    assert Comparison.model_validate(document) == comparison()


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    page = page_of(comparison())
    assert "http" not in page and "<script" not in page and "@import" not in page
    assert "<b>no |" not in page and "&lt;b&gt;no | room" in page and "tiny &lt;model&gt;" in page


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """No error, no request but for the file itself, and nothing sticks out or gets too small at 1280 and 400 pixels."""
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium here (on Debian: apt-get install chromium)")
    place = tmp_path / "comparison.html"
    place.write_text(page_of(comparison()), encoding="utf-8")
    with browser(program) as page:
        for width in (1280, 400):
            page.open(place.as_uri(), width)
            requests = [e["params"]["request"]["url"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
            assert [url for url in requests if not url.startswith("data:")] == [place.as_uri()]
            assert not [event for event in page.events if event.get("method") in FAULTS]
            assert page.evaluate("innerWidth") == width
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            texts = "[...document.querySelectorAll('td,th,dd,span,b,p,li')]"
            assert page.evaluate(f"Math.min(...{texts}.map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 13
            boxes = "[...document.querySelectorAll('.bar i')].map(e => e.getBoundingClientRect().width)"
            widths = page.evaluate(boxes)
            assert widths[3] == max(widths) and widths[0] == pytest.approx(widths[3] / 2, rel=0.02)  # llama.cpp, twice ours
            assert page.evaluate("document.querySelectorAll('.lane').length") == 8
            assert page.evaluate("document.querySelectorAll('polyline').length") == 4
