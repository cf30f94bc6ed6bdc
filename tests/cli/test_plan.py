"""plan and explain: documents as the interface says, refusals in one sentence, nothing written where nothing came of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmoffload.profiler.store import default_profile_path, save_profile
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import read_value
from tests.cli.conftest import Call, files_below, make_model
from tests.cli.machines import machine

CONTRACT = (
    "schema model machine workload quality policy predicted_by_policy status bound_tokens_per_s gap micro_batch num_micro_batches "
    "attention weights kv hidden kernels threads prefetch_depth predicted binding shadow_prices looser_quality solve_s programs_solved"
)
WORK = ("--num-prompts", "4", "--prompt-len", "16", "--gen-len", "8")


def test_plan_document(call: Call, profiled: Path, model: Path) -> None:
    shown = call("plan", model, *WORK, "--weights-memory", "60%", "--out", "plan.json", "--json")
    assert shown.code == 0
    document = json.loads(shown.out)
    assert set(CONTRACT.split()) <= set(document)
    assert document["schema"] == 1
    assert document["status"] == "optimal"
    assert sum(document["weights"]["bytes"].values()) == sum(p.stat().st_size for p in model.glob("*.safetensors")) - _header_bytes(model)
    assert document["weights"]["bytes"]["disk"] > 0
    assert read_value(Plan, Path("plan.json"), "plan") == Plan.model_validate(document)
    table = call("plan", model, *WORK)
    assert table.code == 0
    assert "tokens/s" in table.out
    assert "{" not in table.out


def test_explain_finds_model_and_machine_again(call: Call, profiled: Path, model: Path) -> None:
    assert call("plan", model, *WORK, "--weights-memory", "60%", "--out", "plan.json").code == 0
    document = json.loads(call("explain", "plan.json", "--json").out)
    assert document["moved_bytes_per_step"] > 0
    assert document["bound_tokens_per_s"] >= document["predicted_tokens_per_s"] > 0
    shown = call("explain", "plan.json")
    assert shown.code == 0
    assert "prefill" in shown.out
    save_profile(machine(name="another"), default_profile_path())
    other = call("explain", "plan.json")
    assert other.code == 1
    assert "made for another machine" in other.sentence


def test_a_shape_needs_no_weights(call: Call, home: Path) -> None:
    save_profile(machine(memory_bytes=2**40), Path("big.json"))
    shown = call("plan", "shape:opt-30b", "--machine", "big.json", *WORK, "--json")
    assert shown.code == 0
    assert json.loads(shown.out)["machine"]["name"] == "by-hand"


def test_infeasible(call: Call, profiled: Path, model: Path) -> None:
    before = files_below(profiled.parent)
    shown = call("plan", model, *WORK, "--host-memory", "100MiB", "--json", "--out", "plan.json")
    assert shown.code == 3
    document = json.loads(shown.out)
    assert document["status"] == "infeasible"
    assert document["short"]["resource"] == "host memory"
    assert document["short"]["bytes"] > 0
    assert document["advice"] in shown.err
    assert len(shown.err.splitlines()) == 1
    assert files_below(profiled.parent) == before
    ran = call("run", model, *WORK, "--host-memory", "100MiB", "--output", "out.jsonl", "--report", "report.json")
    assert ran.code == 3
    assert ran.out == ""
    assert files_below(profiled.parent) == before


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["plan", "shape:none-such"], 2, "no shape named 'none-such'"),
        (["plan", "nowhere"], 1, "no model at nowhere"),
        (["plan", "shape:opt-30b", "--num-prompts", "0"], 2, "num-prompts is 0"),
        (["plan", "shape:opt-30b", "--gen-len", "0"], 2, "gen-len is 0"),
        (["plan", "shape:opt-30b", "--gen-len", str(10**30)], 2, "at most 1000000000"),
        (["plan", "shape:opt-30b", "--num-prompts", str(10**9)], 2, "at most 1000000"),
        (["plan", "shape:opt-30b", "--prompt-len", "2048", "--gen-len", "1"], 1, "2048 positions"),
        (["plan", "shape:opt-30b", "--out", "."], 1, "is a folder"),
        (["plan", "shape:opt-30b", "--out", "no/such/plan.json"], 1, "does not exist"),
        (["profile", "--out", "."], 1, "is a folder"),
        (["plan", "shape:opt-30b", "--host-memory", "64000MiBGiB"], 2, "is not a size"),
        (["plan", "shape:opt-30b", "--weights-memory", "140%"], 2, "not a percentage"),
        (["plan", "shape:opt-30b", "--threads", "0"], 2, "threads is 0"),
        (["plan", "shape:opt-30b", "--solve-time", "soon"], 2, "not a duration"),
        (["plan", "shape:opt-30b", "--machine", "absent.json"], 1, "absent.json"),
        (["plan", "shape:opt-30b", "--input", "job.jsonl"], 2, "shape without weights"),
        (["plan", "shape:opt-30b", "--input", "job.jsonl", "--num-prompts", "3"], 2, "Give one of"),
        (["run", "shape:opt-30b", "-p", "a"], 2, "shape without weights"),
        (["explain", "absent.json"], 1, "absent.json cannot be read"),
        (["make-dummy", "none-such", "dummy"], 2, "no shape named 'none-such'"),
    ],
)
def test_wrong_values_are_one_sentence(call: Call, profiled: Path, arguments: list[str], code: int, word: str) -> None:
    before = files_below(profiled.parent)
    shown = call(*arguments)
    assert (shown.code, shown.out) == (code, "")
    assert word in shown.err
    assert len(shown.err.splitlines()) == 1
    assert files_below(profiled.parent) == before


def test_unreadable_profiles(call: Call, home: Path) -> None:
    good = machine().model_dump_json()
    for text, word in (
        ("", "is not valid"),
        ("{}", "is not valid"),
        (good[: len(good) // 2], "is not valid"),
        (good.replace('"cores"', '"kores"', 1), "host.cores"),
        (good.replace('"schema_version":1', '"schema_version":99'), "schema_version"),
    ):
        Path("machine.json").write_text(text, encoding="utf-8")
        shown = call("plan", "shape:llama-1.1b", "--machine", "machine.json", "--out", "plan.json")
        assert (shown.code, shown.out) == (1, "")
        assert word in shown.err
        assert len(shown.err.splitlines()) == 1
        assert not Path("plan.json").exists()
    default_profile_path().parent.mkdir(parents=True)
    default_profile_path().write_bytes(b"\xff")
    shown = call("plan", "shape:llama-1.1b")
    assert shown.code == 1
    assert str(default_profile_path()) in shown.err


def test_damaged_checkpoints(call: Call, profiled: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "damaged")
    weights = next(folder.glob("*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-200])
    before = files_below(tmp_path)
    for command in (["inspect", folder], ["plan", folder, "--out", "plan.json"], ["run", folder, "-p", "a", "--report", "report.json"]):
        shown = call(*command)
        assert (shown.code, shown.out) == (1, "")
        assert weights.name in shown.err
        assert len(shown.err.splitlines()) == 1
    weights.unlink()
    shown = call("run", folder, "-p", "a")
    assert (shown.code, len(shown.err.splitlines())) == (1, 1)
    weights.write_bytes(data)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "perceptron"}), encoding="utf-8")
    shown = call("run", folder, "-p", "a")
    assert (shown.code, len(shown.err.splitlines())) == (1, 1)
    assert "perceptron" in shown.err
    assert files_below(tmp_path) == before


def _header_bytes(model: Path) -> int:
    (file,) = model.glob("*.safetensors")
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_common_lengths_are_cut_to_the_models_positions(call: Call, profiled: Path, model: Path) -> None:
    planned = json.loads(call("plan", model, "--json").out)
    assert planned["workload"]["prompts"] == [{"length": 192, "count": 16}], "256 positions, of which 64 for new tokens"
    assert planned["workload"]["gen_len"] == 64
