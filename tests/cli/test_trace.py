"""`run --trace`: one Chrome trace document with both timelines."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call

WORK = ("--num-prompts", "7", "--prompt-len", "9", "--gen-len", "4", "--micro-batch", "2", "--num-micro-batches", "2")


@pytest.fixture
def document(call: Call, profiled: Path, model: Path) -> dict[str, Any]:
    ran = call("run", model, *WORK, "--weights-memory", "40%", "--trace", "trace.json", "--output", "out.jsonl")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(Path("trace.json").read_text(encoding="utf-8"))
    return found


def test_it_is_a_chrome_trace(document: dict[str, Any]) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events and metadata."""
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"}
    assert {name for (_, tid), name in names.items() if tid == 0} == {"predicted", "measured"}
    assert {name for (_, tid), name in names.items() if tid} == {"disk_read", "host_compute"}
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(complete) + len(names) == len(document["traceEvents"])
    for event in complete:
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert (event["pid"], event["tid"]) in names and event["ts"] >= 0 and event["dur"] >= 0


def test_both_halves_hold_the_same_tasks_of_the_first_block(document: dict[str, Any]) -> None:
    def told(process: str) -> Counter[tuple[str, str, int]]:
        number = next(e["pid"] for e in document["traceEvents"] if e["name"] == "process_name" and e["args"]["name"] == process)
        return Counter((e["name"], e["cat"], e["args"]["step"]) for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == number)

    predicted, measured = told("predicted"), told("measured")
    assert predicted == measured
    assert max(predicted.values()) == 1, "a name and a step are one task"
    for step in range(4):
        for layer in range(4):
            for batch in (0, 1):
                names = [name for name, kind, at in measured if (kind, at) == ("compute", step) and f"· batch {batch}" in name]
                assert any(name.startswith(f"layer {layer}") for name in names)
    assert any(kind == "read_weights" for _, kind, _ in measured)


def test_nothing_overlaps_on_one_resource(document: dict[str, Any]) -> None:
    for process in (1, 2):
        for thread in {e["tid"] for e in document["traceEvents"] if e["pid"] == process and e["tid"]}:
            spans = sorted(
                (e["ts"], e["ts"] + e["dur"]) for e in document["traceEvents"] if (e["ph"], e["pid"], e["tid"]) == ("X", process, thread)
            )
            assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))
