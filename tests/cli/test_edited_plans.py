"""Plans are files that people edit: what an edit asks for is done or refused in one sentence, never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmoffload.api import planning
from lmoffload_solver.workload import MOST_PROMPTS
from tests.cli.conftest import Call, files_below

WORK = ("--num-prompts", "6", "--prompt-len", "16", "--gen-len", "6")
Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"
MISSING = object()


@pytest.fixture
def plan(call: Call, profiled: Path, model: Path) -> dict[str, Any]:
    batches = ("--micro-batch", "2", "--num-micro-batches", "2")
    shown = call("plan", model, *WORK, *batches, "--weights-memory", "60%", "--out", "plan.json", "--json")
    assert shown.code == 0, shown.err
    document: dict[str, Any] = json.loads(shown.out)
    assert document["weights"]["tensors"][Q_PROJ]["tier"] == "disk"
    return document


def _edit(plan: dict[str, Any], place: tuple[str, ...], value: object) -> None:
    document = json.loads(json.dumps(plan))
    part = document
    for step in place[:-1]:
        part = part[step]
    if value is MISSING:
        del part[place[-1]]
    else:
        part[place[-1]] = value
    Path("edited.json").write_text(json.dumps(document), encoding="utf-8")


REFUSED: list[tuple[tuple[str, ...], object, str]] = [
    (("weights", "tensors", Q_PROJ), MISSING, f"leaves out the tensor {Q_PROJ}"),
    (("weights", "tensors", NORM), MISSING, f"leaves out the tensor {NORM}"),
    (("weights", "tensors"), {}, "leaves out the tensor"),
    (("weights", "tensors", "extra"), {"format": "fp32", "tier": "host"}, "tensor 'extra' that the model has not"),
    (("weights", "tensors", Q_PROJ, "format"), "bf16", "stored as fp32"),
    (("weights", "tensors", Q_PROJ, "tier"), "device", "on the device"),
    (("weights", "tensors", Q_PROJ, "tier"), "host", "bytes where the plan has"),
    (("weights", "tensors", NORM, "tier"), "disk", "vectors are always in memory"),
    (("weights", "bytes", "disk"), 1, "where the plan has 1"),
    (("weights", "bytes", "host"), -1, "weights.bytes.host"),
    (("weights", "format", "mlp"), "int4-g32", "the format int4-g32"),
    (("weights", "format", "experts"), "fp32", "the class experts"),
    (("kv", "format", "key"), "int4", "keys as int4"),
    (("kv", "homes"), [[0, 0, "disk"]], "keys and values on the disk"),
    (("kv", "homes"), [[0, 9, "host"]], "no such pair"),
    (("attention", "decode"), "device", "decode's attention on the device"),
    (("attention", "host_share"), 0.5, "50% of attention"),
    (("hidden", "tier"), "disk", "hidden states on the disk"),
    (("threads",), {}, "leaves out the threads of compute"),
    (("threads", "compute"), 0, "threads.compute"),
    (("threads", "compute"), 3, "has not measured"),
    (("threads", "disk_io"), 10**9, "threads.disk_io"),
    (("prefetch_depth",), 10**9, "prefetch_depth"),
    (("micro_batch",), 10**9, "micro_batch"),
    (("micro_batch",), 1000, "KV cache"),
    (("num_micro_batches",), -1, "num_micro_batches"),
    (("kernels", "decode"), "guess", "the kernel 'guess'"),
    (("predicted", "tokens_per_s"), 0, "predicts nothing"),
    (("predicted", "step_s"), -1, "predicted.step_s"),
    (("workload", "prompts"), [{"length": 16, "count": MOST_PROMPTS}] * 2, "prompts"),
]


@pytest.mark.parametrize(("place", "value", "word"), REFUSED, ids=[".".join(place[:3])[-40:] for place, _, _ in REFUSED])
def test_what_does_not_hold_is_refused(
    call: Call, profiled: Path, model: Path, plan: dict[str, Any], place: tuple[str, ...], value: object, word: str
) -> None:
    _edit(plan, place, value)
    before = files_below(profiled.parent)
    shown = call("run", model, "--plan", "edited.json", *WORK, "--output", "out.jsonl")
    assert (shown.code, shown.out, len(shown.err.splitlines())) == (1, "", 1), shown.err
    assert word in shown.sentence
    assert "unexpectedly" not in shown.sentence
    assert files_below(profiled.parent) == before


@pytest.mark.parametrize(("place", "value"), [(("prefetch_depth",), 0), (("prefetch_depth",), 40), (("micro_batch",), 1)])
def test_what_holds_is_done(call: Call, model: Path, plan: dict[str, Any], place: tuple[str, ...], value: object) -> None:
    _edit(plan, place, value)
    planned, edited = (call("run", model, "--plan", file, *WORK) for file in ("plan.json", "edited.json"))
    assert (planned.code, edited.code) == (0, 0), edited.err
    assert sorted(edited.out.splitlines()) == sorted(planned.out.splitlines())
    assert call("explain", "edited.json").code == 0


def test_a_plan_for_more_than_there_is_now_is_not_begun(
    call: Call, model: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "memory_of_process", lambda: plan["predicted"]["peak_bytes"]["host"] - 1)
    shown = call("run", model, "--plan", "plan.json", *WORK, "--output", "out.jsonl")
    assert (shown.code, shown.out) == (3, "")
    assert "this process may use" in shown.sentence
    assert not Path("out.jsonl").exists()
    assert call("explain", "plan.json").code == 0
    monkeypatch.setattr(planning, "memory_of_process", lambda: plan["predicted"]["peak_bytes"]["host"])
    assert call("run", model, "--plan", "plan.json", *WORK).code == 0
    found = planning.read_limits()
    monkeypatch.setattr(planning, "read_limits", lambda: found.model_copy(update={"cores": plan["threads"]["compute"] - 1}))
    if plan["threads"]["compute"] > 1:
        assert "cores now" in call("run", model, "--plan", "plan.json", *WORK).sentence
