"""Other systems' policies as plans, and ours against the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmoffload_solver.errors import InfeasibleError, StatedError
from lmoffload_solver.explain import explain
from lmoffload_solver.outcome import plan_in
from lmoffload_solver.policies.flexgen_model import PolicyRow
from lmoffload_solver.policies.price import Policy, price_policy, price_row, read_rows
from lmoffload_solver.search import solve
from lmoffload_solver.workload import Limits, PromptGroup, Workload
from tests.solver.policies.published import PUBLISHED
from tests.solver.policies.test_published_throughput import machine, shape
from tests.solver.toys import make_machine

FILE = Path(__file__).with_name("flexgen.json")


def job(count: int, prompt: int = 512, quality: str = "exact", gen: int = 32) -> Workload:
    return Workload(prompts=(PromptGroup(length=prompt, count=count),), gen_len=gen, quality=quality)  # type: ignore[arg-type]


def test_a_policy_file_is_priced_and_predicted_by_its_own_model() -> None:
    work = job(144)
    row = read_rows(FILE, shape("opt-30b"), work)
    assert (row.micro_batch, row.num_micro_batches, row.kv_4bit) == (48, 3, False)
    plan = price_row(row, shape("opt-30b"), machine("t4-gcp"), work, Limits())
    assert plan.policy == "flexgen"
    assert plan.runtime is not None
    assert plan.predicted_by_policy is not None
    assert plan.predicted_by_policy.tokens_per_s == pytest.approx(7.14, abs=0.005)
    assert plan.attention.decode == "host"
    assert any("bytes of device" in remark for remark in plan.remarks)
    assert read_rows(FILE, shape("opt-30b"), job(512, quality="int4")).kv_4bit


def test_policy_files_that_do_not_serve(tmp_path: Path) -> None:
    with pytest.raises(StatedError, match="no row for opt-13b"):
        read_rows(FILE, shape("opt-13b"), job(4))
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"percent": [90, 90, 0, 100, 0, 100], "micro_batch": 1, "num_micro_batches": 1}), encoding="utf-8")
    with pytest.raises(StatedError, match="add up to 100"):
        read_rows(bad, shape("opt-30b"), job(4))
    bad.write_text("{", encoding="utf-8")
    with pytest.raises(StatedError, match="JSON"):
        read_rows(bad, shape("opt-30b"), job(4))
    good = tmp_path / "good.json"
    good.write_text(json.dumps([{"percent": [0, 100, 0, 100, 0, 100], "micro_batch": 8, "num_micro_batches": 1}]), encoding="utf-8")
    assert read_rows(good, shape("opt-13b"), job(4)) == PolicyRow(percent=(0, 100, 0, 100, 0, 100), micro_batch=8, num_micro_batches=1)


@pytest.mark.parametrize("policy", ["accelerate", "zero-inference", "flexgen"])
def test_own_choices_fit_and_ours_is_quicker(policy: Policy) -> None:
    work = job(16)
    plan = price_policy(policy, shape("opt-6.7b"), machine("t4-gcp"), work, Limits())
    assert plan.policy == policy
    assert plan.predicted.peak_bytes["device"] <= 15 * 2**30
    ours = plan_in(solve(shape("opt-6.7b"), machine("t4-gcp"), work, Limits()))
    assert ours is not None
    assert ours.predicted.tokens_per_s >= plan.predicted.tokens_per_s
    assert (plan.predicted_by_policy is not None) == (policy == "flexgen")


def test_a_policy_that_divides_work_with_a_device_needs_one() -> None:
    with pytest.raises(StatedError, match="divides work with a device"):
        price_policy("flexgen", shape("opt-6.7b"), make_machine(), job(16), Limits())


def test_a_policy_without_room_says_so() -> None:
    with pytest.raises(InfeasibleError, match="--device-memory"):
        price_policy("zero-inference", shape("opt-30b"), machine("t4-gcp"), job(4), Limits(device_memory_bytes=2**30))


@pytest.mark.parametrize("row", PUBLISHED["policies"]["rows"], ids=lambda row: f"{row['model']}-{row['prompt']}-{row['micro_batch']}")
def test_ours_is_at_least_as_quick_on_every_published_row(row: dict[str, object]) -> None:
    policy = PolicyRow.model_validate({key: value for key, value in row.items() if key not in ("model", "prompt")})
    model, quality = shape(str(row["model"])), "int4" if policy.weights_4bit or policy.kv_4bit else "exact"
    work = job(policy.micro_batch * policy.num_micro_batches, int(str(row["prompt"])), quality)
    theirs = price_row(policy, model, machine("t4-gcp"), work, Limits())
    ours = plan_in(solve(model, machine("t4-gcp"), work, Limits()))
    assert ours is not None
    assert ours.predicted.tokens_per_s >= theirs.predicted.tokens_per_s
    assert ours.gap <= 0.05


def test_int4_weights_and_kv_on_the_device_of_32_gb() -> None:
    work = job(32, 512, "int4", gen=100)
    plan = plan_in(solve(shape("opt-13b"), machine("v100-32gb"), work, Limits()))
    assert plan is not None
    assert plan.weights.format["attention"] == plan.weights.format["mlp"] == "int4-g64"
    assert {tier for _, _, tier in plan.kv.homes} == {"device"}
    assert plan.weights.bytes["host"] == plan.weights.bytes["disk"] == 0


def test_reasons() -> None:
    work = job(144, quality="int4")
    model, on = shape("opt-30b"), machine("t4-gcp")
    plan = plan_in(solve(model, on, work, Limits()))
    assert plan is not None
    told = explain(model, on, plan)
    assert told.prefill.seconds + told.decode.seconds == pytest.approx(plan.predicted.total_s)
    assert sum(told.memory_parts.values()) == plan.predicted.peak_bytes["device"]
    terms = {(term.what, term.phase): term for term in told.quantization}
    assert terms["weights", "decode"].saved_s["upload"] > 0
    assert terms["kv", "decode"].spent_s["device"] > 0
    assert terms["kv", "prefill"].spent_s["device"] > 0, "quantizing the prompts' KV has its price"
    rates = {other.change: other.tokens_per_s for other in told.alternatives}
    assert rates["no offload"] is None
    assert rates["16-bit weights and KV"] is not None
    assert all(rate is None or rate <= plan.predicted.tokens_per_s * 1.005 for rate in rates.values())
    assert told.cores is not None
    assert told.cores.best.slowest_s <= told.cores.default.slowest_s
