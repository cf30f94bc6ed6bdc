"""Waiting prompts take the places of finished rows: every row is as without, and weights are read fewer times."""

from __future__ import annotations

import random
import time
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload.executor import Engine, Request, spill
from lmoffload.executor.micro_batch import MicroBatch
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.row import make_row
from lmoffload.executor.waiting import Waiting
from lmoffload_solver.errors import StatedError
from lmoffload_solver.memory import spilled_of
from lmoffload_solver.workload import Workload
from tests.executor.plans import make_plan
from tests.executor.reference import prompts

LENGTHS = (40, 30, 17, 5, 3, 26, 9, 34, 12)
NEW_TOKENS = (2, 7, 1, 9, 3, 12, 1, 5, 4)


def plan_of(checkpoint, refill, *, homes=(), chunk=None, **choices):
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, tokens=100, **choices)
    rooms = sorted((length + new for length, new in zip(LENGTHS, NEW_TOKENS, strict=True)), reverse=True)
    kv = plan.kv.model_copy(update={"homes": tuple((layer, batch, "disk") for layer, batch in homes)})
    work = Workload.of_lengths([room - 1 for room in rooms], 1)  # a block's first rows are those that need most room
    plan = plan.model_copy(update={"kv": kv, "workload": work, "refill": refill, "prefill_chunk": chunk})
    on_disk = sum(one.num_bytes for one in spilled_of(checkpoint.shape, plan).values())
    return plan.model_copy(update={"kv": kv.model_copy(update={"bytes": {**kv.bytes, "disk": on_disk}})})


def generate(checkpoint, plan, cache, new_tokens=NEW_TOKENS):
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    with Engine(checkpoint, plan, cache=cache) as engine:
        requests = [Request(str(i), tuple(text), new) for i, (text, new) in enumerate(zip(texts, new_tokens, strict=True))]
        seen = []
        done = engine.generate(requests, on_progress=seen.append)
        assert engine.meter.prompts == len(requests) and engine.meter.tokens >= sum(len(one.token_ids) for one in done)
        shares = [step.share for step in seen]
        assert shares == sorted(shares) and shares[-1] == pytest.approx(1) and seen[-1].num_done == len(requests)
        return [(one.token_ids, one.finish_reason) for one in done], dict(engine.meter.counts), len(seen)


CASES = {
    "llama": ("llama", {}),
    "windows, quantized keys and values": ("gemma3", {"kv": ("int8", "int4-g32")}),
    "cut at matrices": ("mistral", {"stream": "matrix", "kv": ("int4-g32", "bf16")}),
    "chunks": ("qwen2", {"chunk": 24}),
    "biases and learned positions": ("opt", {"micro_batch": 3, "num_micro_batches": 1}),
    "keys and values on the disk": ("gemma3", {"homes": [(0, 0), (1, 1), (2, 0), (2, 1)], "kv": ("int8", "int4-g32")}),
    "on the disk, in chunks": ("llama", {"homes": [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], "chunk": 24}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_as_without(tiny, tmp_path, case, monkeypatch):
    """With all weights streamed, some rows ended by a stop token, and disks that take their time."""
    family, choices = CASES[case]
    plain = tiny(family, num_layers=3)
    alone = {"micro_batch": 1, "num_micro_batches": 1, "kv": choices.get("kv", ("fp32", "fp32"))}
    whole, _, _ = generate(plain, plan_of(plain, None, **alone), tmp_path)
    checkpoint = tiny(family, num_layers=3, eos_token_id=whole[3][0][4])
    expected, _, _ = generate(checkpoint, plan_of(checkpoint, None, **alone), tmp_path)
    assert "stop" in {reason for _, reason in expected}
    chance, read, write = random.Random(0), DiskReader.read, spill.SpillFile.write_from

    def late(function):
        def call(*arguments):
            time.sleep(0.002 * (chance.random() < 0.1))
            function(*arguments)
            time.sleep(0.002 * (chance.random() < 0.1))

        return call

    monkeypatch.setattr(DiskReader, "read", late(read))
    monkeypatch.setattr(spill.SpillFile, "write_from", late(write))
    steps = {}
    for refill in (None, 1, 2):
        found, counts, steps[refill] = generate(checkpoint, plan_of(checkpoint, refill, resident=set(), **choices), tmp_path)
        assert found == expected, refill
        assert ("load_kv" in counts) == ("homes" in choices)
    assert steps[1] < steps[None]


def test_weights_are_read_once_a_step_and_steps_are_fewer(tiny, tmp_path):
    """Two places. One row takes 10 steps and eight take 2: blocks of two need 10 + 2 + 2 + 2 + 2 steps, or (one place the long row's, the
    other those of five short ones one after another, then both places those of the other three) 10 + 2 + 2."""
    checkpoint = tiny("llama", num_layers=3)
    new_tokens = (10, 2, 2, 2, 2, 2, 2, 2, 2)
    expected, found = {None: 18, 1: 14, 2: 18}, {}
    for refill, num_steps in expected.items():
        plan = plan_of(checkpoint, refill, resident=set(), micro_batch=2, num_micro_batches=1)
        found[refill], counts, steps = generate(checkpoint, plan, tmp_path, new_tokens)
        units = 3 + 1  # three layers and the head
        assert steps == num_steps and counts["read_weights"] == units * num_steps
    assert found[None] == found[1] == found[2]


def steps_of(shape, plan, new_tokens):
    """Steps of a job, walked with what the engine uses to fill places and nothing computed."""
    rows = [make_row(Request(str(i), (1,) * (1 + i % 3), new), {}, 10) for i, new in enumerate(new_tokens)]
    size, steps = plan.micro_batch, 0
    waiting = Waiting(rows, size * plan.num_micro_batches, plan.refill, lambda row: None)
    while block := waiting.take():
        batches = [MicroBatch(i, block[at : at + size], shape, plan, None) for i, at in enumerate(range(0, len(block), size))]
        while not all(batch.done for batch in batches):
            for row in [row for batch in batches for row in batch.rows if row.active]:
                row.take(1, frozenset(), None)
            steps += 1
            if not all(batch.done for batch in batches):
                waiting.fill(batches)
    assert all(len(row.generated) == row.request.max_new_tokens for row in rows) and not waiting
    return steps


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_never_more_steps(tiny, new_tokens, micro_batch, num_micro_batches):
    checkpoint = tiny("llama", num_layers=3)
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, micro_batch=micro_batch, num_micro_batches=num_micro_batches)
    without = steps_of(checkpoint.shape, plan, new_tokens)
    assert steps_of(checkpoint.shape, plan.model_copy(update={"refill": 1}), new_tokens) <= without
    equal = [max(new_tokens)] * len(new_tokens)
    counts = {steps_of(checkpoint.shape, plan.model_copy(update={"refill": refill}), equal) for refill in (None, 1, micro_batch)}
    assert counts == {max(new_tokens) * -(-len(equal) // (micro_batch * num_micro_batches))}


def test_less_memory_than_planned_changes_no_row(tiny, tmp_path):
    """Said to be short now and then: the last micro-batch, then half of the only one, come again; at last one row is too much."""
    checkpoint = tiny("gemma3", num_layers=3)
    expected = generate(checkpoint, plan_of(checkpoint, None, micro_batch=1, num_micro_batches=1), tmp_path)[0]
    plan = plan_of(checkpoint, 1, resident=set(), micro_batch=3, num_micro_batches=2)
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    requests = [Request(str(i), tuple(text), new) for i, (text, new) in enumerate(zip(texts, NEW_TOKENS, strict=True))]
    for places, seen in ((3, (4,)), (1, (2, 4))):
        steps = count()
        with Engine(checkpoint, plan, cache=tmp_path) as engine:
            found = engine.generate(requests, short=lambda steps=steps, seen=seen: next(steps) in seen)
            assert [(one.token_ids, one.finish_reason) for one in found] == expected
            assert engine.remarks == [f"Memory got short: blocks were made smaller, from 6 prompts to {places}."]
    done = []
    with Engine(checkpoint, plan) as engine, pytest.raises(StatedError, match="Memory is short even for one prompt"):
        engine.generate(requests, done.append, short=lambda: bool(done))
    assert 0 < len(done) < len(requests) and all((one.token_ids, one.finish_reason) == expected[int(one.id)] for one in done)


def test_little_is_in_vain(tiny):
    """Prompts of 5 to 900 tokens, completions of 1 to 24. Batches of eight in the file's order, filled up to the longest of each and run
    until its last has finished, compute more than 1.5 times as many tokens, in more steps."""
    checkpoint = tiny("llama", num_layers=1, hidden_size=32, max_position_embeddings=1024)
    chance, count, places = random.Random(0), 32, 8
    lengths, new_tokens = [chance.randint(5, 900) for _ in range(count)], [chance.randint(1, 24) for _ in range(count)]
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, tokens=1000, micro_batch=4).model_copy(update={"refill": 1})
    requests = [Request(str(i), (5,) * length, new) for i, (length, new) in enumerate(zip(lengths, new_tokens, strict=True))]
    seen = []
    with Engine(checkpoint, plan) as engine:
        engine.generate(requests, on_progress=seen.append)
        waste, computed = engine.report().waste, sum(phase.tokens for phase in engine.meter.forwards.values())
        assert waste is not None and waste.padding == engine.meter.padding_tokens / computed < 0.1
        assert computed - engine.meter.padding_tokens == sum(lengths) + sum(new_tokens) - count
        assert waste.idle_places == pytest.approx(1 - sum(new_tokens) / engine.meter.places) and waste.idle_places < 0.3
        assert 0 < waste.unused_kv < 0.7, "short prompts come in places of long ones"
    batches = [slice(at, at + places) for at in range(0, count, places)]
    fixed = sum(places * (max(lengths[batch]) + max(new_tokens[batch]) - 1) for batch in batches)
    assert fixed > 1.5 * computed and sum(max(new_tokens[batch]) for batch in batches) > 1.3 * len(seen)


def test_more_places_than_a_micro_batch_has(tiny):
    checkpoint = tiny("llama", num_layers=3)
    with pytest.raises(StatedError, match="when 3 places of a micro-batch are free, and one has 2"):
        Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint).model_copy(update={"refill": 3}))
