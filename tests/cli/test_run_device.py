"""`lmoffload run` with an emulated device: the completions of the host alone, from a fresh plan and from a file; report and trace."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Call

JOB = ("--num-prompts", 6, "--prompt-len", 12, "--gen-len", 5, "--seed", 3)


def test_run_on_an_emulated_device(call: Call, profiled: Path, model: Path) -> None:
    plain = call("run", model, *JOB)
    assert plain.code == 0
    device = ("--emulate-device", "64MiB@1GB/s")
    shown = call("run", model, *JOB, *device, "--report", "report.json", "--trace", "trace.json")
    assert shown.code == 0 and shown.out == plain.out
    report = json.loads(Path("report.json").read_text())
    assert report["emulated"] and set(report["threads"]) == {"compute", "host_attention", "disk_io", "staging"}
    for tier in ("device", "host"):
        assert report["measured"]["peak_bytes"][tier] > 0 and report["predicted"]["peak_bytes"][tier] > 0
    assert report["measured"]["peak_bytes"]["device"] <= report["predicted"]["peak_bytes"]["device"] <= 64 * 2**20
    assert 0 < report["measured"]["total_s"] < 60 and report["threads"]["compute"]["cpu_s"] > 0
    halves: dict[int, set[tuple[str, str]]] = {1: set(), 2: set()}
    for event in json.loads(Path("trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            halves[event["pid"]].add((event["cat"], event["name"]))
    assert halves[1] == halves[2] and len(halves[1]) > 3

    two = call("run", model, *JOB, *device, *device, "--micro-batch", 2, "--num-micro-batches", 3, "--report", "two.json")
    assert two.code == 0 and two.out == plain.out
    report = json.loads(Path("two.json").read_text())
    assert sum(report["plan"]["layers_per_device"]) > 1 and len(report["plan"]["layers_per_device"]) == 2
    assert report["measured"]["peak_bytes"]["device"] <= report["predicted"]["peak_bytes"]["device"]
    assert call("run", model, *JOB, *device, "--emulate-device", "32MiB@1GB/s").code == 2

    call("plan", model, "--num-prompts", 6, "--prompt-len", 12, "--gen-len", 5, *device, "--out", "plan.json")
    again = call("run", model, *JOB, "--plan", "plan.json")
    assert again.code == 0 and again.out == plain.out
