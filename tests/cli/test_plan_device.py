"""`plan`, `explain` and `what-if` on a machine with a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmoffload.cli.main import main

WORK = ["--machine", "t4-gcp", "--num-prompts", "8", "--prompt-len", "128", "--gen-len", "8"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_quality_goal_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, _ = call(capsys, "plan", "shape:opt-13b", *WORK, "--quality", "int4", "--out", str(file), "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["quality"] == "int4"
    assert set(plan["predicted"]["peak_bytes"]) == {"device", "host", "disk"}
    code, out, _ = call(capsys, "explain", str(file))
    assert code == 0
    assert "What quantization saves and costs" in out
    assert "by the libraries' default" in out
    code, out, _ = call(capsys, "what-if", str(file), "--link", "2x", "--device-memory", "+4GiB", "--json")
    assert code == 0
    told = json.loads(out)
    assert [answer["change"]["resource"] for answer in told["answers"]] == ["device_memory", "link"]
    assert call(capsys, "what-if", str(file))[0] == 2
    assert call(capsys, "what-if", str(file), "--disk", "fast")[0] == 2
    assert call(capsys, "what-if", str(file), "--cores", "+8")[0] == 2, "eight more are not eight times as many"


def test_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "plan", "shape:opt-6.7b", *WORK, "--policy", "flexgen", "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["policy"] == "flexgen"
    assert plan["predicted_by_policy"]["tokens_per_s"] > 0
    row = tmp_path / "row.json"
    row.write_text('{"percent": [0, 100, 0, 100, 0, 100], "micro_batch": 4, "num_micro_batches": 2}', encoding="utf-8")
    code, out, _ = call(capsys, "plan", "shape:opt-6.7b", *WORK, "--policy-file", str(row), "--json")
    assert code == 0
    assert (json.loads(out)["micro_batch"], json.loads(out)["num_micro_batches"]) == (4, 2)
    assert call(capsys, "plan", "shape:opt-6.7b", *WORK, "--policy", "best")[0] == 2
    assert call(capsys, "plan", "shape:opt-6.7b", *WORK, "--policy", "accelerate", "--policy-file", str(row))[0] == 2


def test_goals(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "plan", "shape:opt-6.7b", *WORK, "--goal", "latency", "--json")
    assert code == 0
    assert json.loads(out)["micro_batch"] == 1
    code, out, err = call(capsys, "plan", "shape:opt-30b", *WORK, "--deadline", "1s", "--json")
    assert code == 3
    assert json.loads(out)["short"]["resource"] == "time"
    assert "more than there are" in err
    assert call(capsys, "plan", "shape:opt-6.7b", *WORK, "--goal", "deadline")[0] == 2
    code, _, err = call(capsys, "plan", "shape:opt-30b", *WORK, "--device-memory", "500MB")
    assert code == 3
    assert "--device-memory" in err


def test_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    assert call(capsys, "plan", "shape:opt-6.7b", *WORK, "--out-plot", str(file))[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, work = tmp_path / "plan.png", ("--num-prompts", "4", "--prompt-len", "32", "--gen-len", "8", "--host-memory", "2GiB")
    assert call(capsys, "plan", "shape:llama-1.1b", "--machine", "xeon-avx512-2-cores", *work, "--out-plot", str(file))[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")
