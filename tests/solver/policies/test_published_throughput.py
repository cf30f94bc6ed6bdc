"""Published throughput of other systems' policies, predicted with those systems' traits."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lmoffload.checkpoint import named_shape
from lmoffload.checkpoint.shape import model_shape
from lmoffload.profiler.store import load_profile
from lmoffload_solver.chain_predict import ChainSimulated, costs_of, simulate_chain
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.model import ModelShape
from lmoffload_solver.policies.accelerate import accelerate_decision
from lmoffload_solver.policies.flexgen_model import PolicyRow
from lmoffload_solver.policies.flexgen_policy import flexgen_decision, flexgen_runtime
from lmoffload_solver.policies.zero_inference import zero_decision
from lmoffload_solver.workload import PromptGroup, Workload
from tests.solver.policies.published import PUBLISHED, rows

ZERO: dict[str, Any] = json.loads(Path(__file__).with_name("zero_inference_2023.json").read_text(encoding="utf-8"))
OPT13B: dict[str, Any] = json.loads(Path(__file__).with_name("opt13b_32gb.json").read_text(encoding="utf-8"))
MODELS = ("opt-6.7b", "opt-30b", "opt-175b")
CELLS = [(model, prompt, kind) for model in MODELS for prompt in (256, 512) for kind in (0, 1)]


@cache
def machine(name: str) -> MachineProfile:
    return load_profile(name)


@cache
def shape(name: str) -> ModelShape:
    if name != "bloom-176b":
        return named_shape(name)
    config = {
        "model_type": "opt",
        "hidden_size": 14336,
        "num_hidden_layers": 70,
        "num_attention_heads": 112,
        "ffn_dim": 57344,
        "vocab_size": 250880,
        "word_embed_proj_dim": 14336,
        "max_position_embeddings": 2048,
    }
    return model_shape(name, config, lambda *_: "bf16", name, tied=True)


def simulate(model: ModelShape, on: str, decision: Decision, prompt: int = 512, gen: int = 32) -> ChainSimulated:
    job = Job(model, Workload(prompts=(PromptGroup(length=prompt, count=decision.block_rows),), gen_len=gen))
    return simulate_chain(job, costs_of(machine(on), decision), decision)


def tokens_per_s(model: ModelShape, on: str, decision: Decision, prompt: int = 512, gen: int = 32) -> float:
    return decision.block_rows * gen / simulate(model, on, decision, prompt, gen).total_s


def published(model: str, prompt: int, kind: int) -> float:
    system = ("flexgen", "flexgen-4bit")[kind]
    (row,) = [r for r in PUBLISHED["throughput_tok_per_s"] if r["system"] == system and r["prompt"] == prompt]
    return float(row[model])


def test_twelve_cells_within_a_quarter() -> None:
    """No constant belongs to a row: the machine's are published or estimated, the runtime's are the same for all."""
    errors = {}
    for model, prompt, kind in CELLS:
        decision = flexgen_decision(shape(model), rows(model, prompt)[kind])
        errors[model, prompt, kind] = tokens_per_s(shape(model), "t4-gcp", decision, prompt) / published(model, prompt, kind) - 1
    assert len(errors) == 12
    assert all(abs(error) <= 0.5 for error in errors.values()), errors
    assert sum(abs(error) <= 0.25 for error in errors.values()) >= 10, errors


@pytest.mark.parametrize("model", MODELS)
def test_longer_prompts_follow_the_same_law(model: str) -> None:
    """Prompt 1024 is not among the twelve. Its 16-bit figures are near FlexGen's own model where that is right (off the device)."""
    decision = flexgen_decision(shape(model), rows(model, 1024)[0])
    predicted = tokens_per_s(shape(model), "t4-gcp", decision, 1024)
    own = {"opt-30b": 3.62, "opt-175b": 0.35}.get(model)
    shorter = tokens_per_s(shape(model), "t4-gcp", flexgen_decision(shape(model), rows(model, 512)[0]))
    assert 0.3 < predicted / shorter < 0.7
    assert own is None or predicted == pytest.approx(own, rel=0.25)


@pytest.mark.parametrize("model", ["opt-30b", "opt-175b"])
def test_ablations_in_the_published_order(model: str) -> None:
    row = rows(model, 512)[0]
    without_cpu = row.model_copy(update={"cpu_attention": False})
    (zero,) = [r for r in PUBLISHED["throughput_tok_per_s"] if r["system"] == "zero-inference" and r["prompt"] == 512]
    batch, lowest = zero["batch"][MODELS.index(model)], zero["lowest_tier"][MODELS.index(model)]
    all_off = PolicyRow(percent=(0, 100 if lowest == "cpu" else 0, 100, 0, 100, 0), micro_batch=batch, num_micro_batches=1)
    ours = {
        "all": tokens_per_s(shape(model), "t4-gcp", flexgen_decision(shape(model), row)),
        "no_overlap": tokens_per_s(shape(model), "t4-gcp", flexgen_decision(shape(model), row, flexgen_runtime(overlap=False))),
        "no_cpu_attention": tokens_per_s(shape(model), "t4-gcp", flexgen_decision(shape(model), without_cpu)),
        "zero_inference_policy": tokens_per_s(shape(model), "t4-gcp", flexgen_decision(shape(model), all_off)),
    }
    wanted = {name: row[model] for name, row in PUBLISHED["ablations_opt_prompt_512_tok_per_s"].items()}
    assert sorted(ours, key=ours.__getitem__) == sorted(wanted, key=wanted.__getitem__), ours


def arm(row: dict[str, Any], model: str) -> Decision:
    _, batch, where = row[model]
    if row["system"] == "zero-inference":
        tier = "host" if where == "cpu" else "disk"
        return zero_decision(shape(model), batch, tier, weights_4bit=row["weights_4bit"], kv_offload=row["kv_offload"])  # type: ignore[arg-type]
    percent = (0, 100 if where == "cpu" else 0, *((0, 100) if row["kv_offload"] else (100, 0)), 100, 0)
    policy = PolicyRow(
        percent=percent, micro_batch=batch, num_micro_batches=1, weights_4bit=row["weights_4bit"], cpu_attention=False
    )
    return flexgen_decision(shape(model), policy, flexgen_runtime(weights_page_locked=False))


@pytest.mark.parametrize("model", ["opt-30b", "opt-66b", "opt-175b", "bloom-176b", "llama-2-70b"])
def test_arms_of_the_a6000_in_their_order(model: str) -> None:
    arms = [(row[model][0], tokens_per_s(shape(model), "a6000", arm(row, model))) for row in ZERO["rows"] if model in row]
    assert len(arms) >= 3
    for (better, ours), (worse, others) in product(arms, arms):
        if better >= 1.15 * worse:
            assert ours > others, (better, worse, arms)


def test_compressed_on_the_device_beats_offloading_on_32_gb() -> None:
    figures = []
    for row in OPT13B["rows"]:
        policy = PolicyRow(
            percent=row["percent"],
            micro_batch=32,
            num_micro_batches=1,
            weights_4bit=row.get("weights_4bit", False),
            kv_4bit=row.get("weights_4bit", False),
            cpu_attention=row.get("cpu_attention", False),
        )
        figures.append(tokens_per_s(shape("opt-13b"), "v100-32gb", flexgen_decision(shape("opt-13b"), policy), 512, row["gen"]))
    assert figures[1] > 2 * figures[0], figures
    assert all(figure == pytest.approx(row["tok_per_s"], rel=0.5) for figure, row in zip(figures, OPT13B["rows"], strict=True)), figures


def test_accelerate_and_zero_are_as_slow_as_published() -> None:
    """Within a factor of two: their batches are published, their maps are not."""
    t4 = machine("t4-gcp")
    assert t4.accelerator is not None
    for name, place in (("opt-6.7b", 0), ("opt-30b", 1)):
        by_system = {r["system"]: r for r in PUBLISHED["throughput_tok_per_s"] if r["prompt"] == 512}
        device_bytes = (14, 9)[place] * 2**30
        greedy = accelerate_decision(shape(name), by_system["accelerate"]["batch"][place], device_bytes, 190 * 2**30)
        zero = zero_decision(shape(name), by_system["zero-inference"]["batch"][place], "host")
        for decision, system in ((greedy, "accelerate"), (zero, "zero-inference")):
            ratio = tokens_per_s(shape(name), "t4-gcp", decision) / by_system[system][name]
            assert 0.5 < ratio < 2.0, (name, system, ratio)
