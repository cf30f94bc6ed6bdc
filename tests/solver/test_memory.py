"""Bytes at the peak of a toy, by hand, and the properties of the formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload_solver import counting, memory
from lmoffload_solver.memory import Capacity, JobMemory
from lmoffload_solver.outcome import Optimal
from lmoffload_solver.schedule import aligned_bytes, num_slots, slot_bytes, units_of
from lmoffload_solver.search import solve
from lmoffload_solver.workload import Limits, PromptGroup, Workload
from tests.solver.toys import MIB, make_machine, make_model, make_work


def test_parts_of_a_toy() -> None:
    work = Workload(prompts=(PromptGroup(length=10, count=3), PromptGroup(length=6, count=2)), gen_len=2)
    job = JobMemory(make_model(), work, 1000)
    parts = job.parts(2, 2, 1, head_streams=False, layers_cut=False)
    assert parts.always["base"] == 1000
    assert parts.always["vectors"] == 5 * 64 * 4
    assert parts.always["kv"] == 4 * 256 * (12 + 12 + 12 + 8), "the four longest, each with room for its prompt and two more"
    per_token = 64 * 4 + 8 + 2 * 16 * 4
    assert parts.phases["prefill"]["suspended"] == (10 + 10 + 10 + 6 + 2 * 4) * per_token
    assert parts.phases["decode"]["suspended"] == (4 + 2 * 4) * per_token
    floats = max(2 * 64 + 5 * 64 + 3 * (32 + 32), 2 * 64 + 3 * 128)
    assert parts.phases["decode"]["layer"] == 4 * 4 * floats
    assert parts.always["tiles"] == 2 * MIB + 4 * 256 * (64 + 128), "the whole of the embedding is less than a tile"
    scores = 3 * 4 * 10 * 10
    assert parts.phases["prefill"]["layer"] == 4 * 20 * floats + scores


def test_quantized_keys_and_values() -> None:
    work = Workload(prompts=(PromptGroup(length=70, count=3),), gen_len=30)
    job = JobMemory(make_model(), work, 1000, "int8", "int4-g32")
    assert job.kv.host_bytes(1, 3, 0) == 3 * 4 * 2 * (3 * 16 * 36 + 32 * 16 * 2 + 100 * 20), "four layers of two heads of 16"


def test_a_streamed_head_keeps_every_logit() -> None:
    job = JobMemory(make_model(), make_work(count=16), 1000)
    streamed, whole = (job.parts(2, 8, 1, head_streams=flag, layers_cut=False).phases["decode"]["head"] for flag in (True, False))
    assert streamed - whole == (16 - 2) * 256 * 4


def test_a_cut_layer_keeps_what_it_has_computed() -> None:
    job = JobMemory(make_model(), make_work(count=16), 1000)
    cut, whole = (job.suspended_bytes(10, flag) for flag in (True, False))
    assert cut - whole == 10 * 4 * (64 + max(2 * 64 + 32 + 32, 128 + 128))


def test_a_fused_product_is_held_twice() -> None:
    model = make_model()
    fused = tuple(t.model_copy(update={"shape": (512, 64)}) if t.name.endswith("gate") else t for t in model.tensors)
    job = JobMemory(model.model_copy(update={"tensors": fused}), make_work(), 1000)
    assert job.layer_bytes(4) == 4 * 4 * (2 * 64 + 512 + 2 * 128)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_larger_blocks_need_more(size: int, count: int, threads: int) -> None:
    job = JobMemory(make_model(windows=(None, 7)), make_work(count=100), 1000)
    here = job.parts(size, count, threads, head_streams=False, layers_cut=False).total
    assert here < job.parts(size + 1, count, threads, head_streams=False, layers_cut=False).total
    assert here < job.parts(size, count + 1, threads, head_streams=False, layers_cut=False).total
    assert here < job.parts(size, count, threads + 1, head_streams=False, layers_cut=False).total
    assert here <= job.parts(size, count, threads, head_streams=True, layers_cut=False).total


def test_breakdown_adds_up_to_the_plans_peak() -> None:
    model, machine = make_model(num_layers=6, hidden=256, intermediate=512), make_machine(20 * MIB, base_bytes=4 * MIB)
    outcome = solve(model, machine, make_work(), Limits())
    assert isinstance(outcome, Optimal)
    plan = outcome.plan
    units = units_of(model, plan)
    parts = memory.breakdown(model, plan)
    assert sum(parts.values()) == memory.peak(model, plan) == plan.predicted.peak_bytes["host"]
    assert parts["ring"] == num_slots(units, plan.prefetch_depth) * slot_bytes(units) > 0
    home = [name for name, tensor in plan.weights.tensors.items() if tensor.tier == "host" and model.by_name[name].is_matrix]
    assert parts["weights"] == sum(aligned_bytes(counting.tensor_bytes(model.by_name[name])) for name in home)
    assert memory.peak(model, plan, base_bytes=0) == plan.predicted.peak_bytes["host"] - 4 * MIB
    assert plan.kv.bytes == {"host": parts["kv"]}


def test_position_tables_are_always_resident() -> None:
    model = make_model()
    table = model.embedding.model_copy(update={"name": "positions", "shape": (100, 64)})
    with_table = model.model_copy(update={"tensors": (*model.tensors, table)})
    assert "positions" not in memory.placeable(with_table)
    assert memory.pinned_bytes(with_table) == aligned_bytes(100 * 64 * 4)


@pytest.mark.parametrize(
    ("limits", "memory_bytes", "weights_bytes"),
    [
        (Limits(), 100, None),
        (Limits(host_memory_bytes=70), 70, None),
        (Limits(host_memory_bytes=700, weights_memory_bytes=9), 100, 9),
        (Limits(weights_memory_share=0.5), 100, (4 * 147456 + 65536 + 5 * 256) // 2),
        (Limits(weights_memory_share=0.5, weights_memory_bytes=9), 100, 9),
    ],
)
def test_capacity(limits: Limits, memory_bytes: int, weights_bytes: int | None) -> None:
    found = Capacity.of(make_model(tied=True), make_machine(100), limits)
    assert (found.memory_bytes, found.weights_bytes) == (memory_bytes, weights_bytes)


def test_scored_prompts_keep_the_logits_of_every_token() -> None:
    """8 prompts of 16 tokens, 4 at a time: the logits of 64 tokens and two copies in place of those of 4, and 64 further ones for 6."""
    work = Workload(prompts=(PromptGroup(length=16, count=8),), gen_len=1)
    plain, scored = (
        JobMemory(make_model(), work.model_copy(update={"scored": flag}), 1000).parts(4, 2, 1, head_streams=False, layers_cut=False)
        for flag in (False, True)
    )
    assert scored.phases["prefill"]["head"] - plain.phases["prefill"]["head"] == 256 * 4 * (3 * (64 - 4) + 64 - 6)
    assert scored.phases["decode"]["head"] - plain.phases["decode"]["head"] == 256 * 4 * (64 - 6)
