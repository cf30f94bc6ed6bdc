"""Runs with an emulated device give what transformers gives, wherever things lie and however late copies are."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
import torch

from lmoffload.executor import Engine, Request
from lmoffload.executor.emulated import EmulatedAccelerator, HeldLink
from lmoffload.executor.reader import DiskReader
from lmoffload.executor.spill import SpillFile
from lmoffload_solver.errors import StatedError
from lmoffload_solver.runtime import Runtime
from tests.executor.device_plans import PLACES, device_plan, make_decision, random_decision
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts
from tests.models import FAMILIES

LENGTHS, NEW_TOKENS = (3, 17, 9, 30, 1, 5, 40, 12), 6


@pytest.fixture
def late(monkeypatch):
    """Every copy, read and write begins and ends late now and then."""
    chance = random.Random(0)

    def lately(function):
        def call(*arguments):
            time.sleep(0.003 * (chance.random() < 0.05))
            function(*arguments)
            time.sleep(0.003 * (chance.random() < 0.05))

        return call

    monkeypatch.setattr(HeldLink, "copy", lately(HeldLink.copy))
    monkeypatch.setattr(DiskReader, "read", lately(DiskReader.read))
    monkeypatch.setattr(SpillFile, "write_from", lately(SpillFile.write_from))


def generate(checkpoint, plan, cache, lengths=LENGTHS, new_tokens=NEW_TOKENS):
    """Tokens of each prompt; the peak of the device, which the plan foresees, is checked."""
    texts = prompts(checkpoint.shape.vocab_size, lengths)
    with Engine(checkpoint, plan, cache=cache) as engine:
        done = engine.generate([Request(str(i), tuple(text), new_tokens) for i, text in enumerate(texts)])
        report = engine.report()
    assert report.emulated == (plan.limits.emulated_device is not None)
    if plan.limits.emulated_device is not None:
        peak, planned = report.measured.peak_bytes["device"], plan.predicted.peak_bytes["device"]
        assert 0 < peak <= min(planned, plan.limits.emulated_device.memory_bytes)
    return [list(one.token_ids) for one in done]


@pytest.fixture(scope="module")
def expected(tiny):
    """expected(family, ...): transformers' own tokens."""
    known = {}

    def of(family, **options):
        key = (family, *options.items())
        if key not in known:
            checkpoint = tiny(family, **options)
            model = load_reference(checkpoint.path)
            known[key] = [greedy(model, text, NEW_TOKENS) for text in prompts(checkpoint.shape.vocab_size, LENGTHS)]
        return known[key]

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_random_placements_of_every_family(tiny, expected, tmp_path, family, late):
    checkpoint, chance = tiny(family, dtype="bf16"), random.Random(family)
    for _ in range(2):
        plan = device_plan(checkpoint, random_decision(checkpoint.shape, chance), LENGTHS, NEW_TOKENS)
        assert generate(checkpoint, plan, tmp_path) == expected(family, dtype="bf16")


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 7])
def test_any_number_of_layers(tiny, expected, tmp_path, num_layers, late):
    checkpoint, chance = tiny("llama", num_layers=num_layers), random.Random(num_layers)
    for depth in (0, 2, 4) if num_layers % 2 else (1, 3):
        decision = random_decision(checkpoint.shape, chance, prefetch_depth=depth)
        plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS)
        assert generate(checkpoint, plan, tmp_path) == expected("llama", num_layers=num_layers)


@pytest.mark.parametrize("unit", PLACES, ids=lambda unit: f"{unit.home}-{unit.attends}")
def test_keys_and_values_in_each_place(tiny, expected, tmp_path, unit, late):
    checkpoint = tiny("llama", num_layers=3)
    for hidden, homes, size, count in (("device", "host", 2, 2), ("host", "disk", 3, 1), ("host", "device", 1, 3)):
        decision = make_decision(checkpoint.shape, kv=unit, hidden=hidden, homes=homes, micro_batch=size, num_micro_batches=count)
        plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS)
        assert generate(checkpoint, plan, tmp_path) == expected("llama", num_layers=3)


@pytest.mark.parametrize("overlap", ["barriers", "none"])
def test_other_runtimes_orders(tiny, expected, tmp_path, overlap, late):
    checkpoint, chance = tiny("llama", num_layers=3), random.Random(overlap)
    for count in (1, 2, 3):
        decision = random_decision(checkpoint.shape, chance, prefetch_depth=1, num_micro_batches=count)
        decision = replace(decision, runtime=Runtime(overlap=overlap))
        plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS)
        assert generate(checkpoint, plan, tmp_path) == expected("llama", num_layers=3)


def test_a_tied_head_wherever_it_lies(tiny, expected, tmp_path):
    options = {"dtype": "fp16", "tied": True, "num_layers": 2}
    checkpoint = tiny("llama", **options)
    for homes in ("device", "host", "disk"):
        plan = device_plan(checkpoint, make_decision(checkpoint.shape, homes=homes), LENGTHS, NEW_TOKENS)
        assert generate(checkpoint, plan, tmp_path) == expected("llama", **options)


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4-g32"])
def test_quantized_keys_and_values_are_those_of_the_host_alone(tiny, tmp_path, kv, late):
    checkpoint, chance = tiny("gemma3", num_layers=3), random.Random(kv)
    lengths = (40, 30, 17, 5)
    wanted = generate(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, kernel="fp32", kv=(kv, kv)), tmp_path, lengths)
    for _ in range(2):
        decision = random_decision(checkpoint.shape, chance, kv_format=kv)
        assert generate(checkpoint, device_plan(checkpoint, decision, lengths, NEW_TOKENS), tmp_path, lengths) == wanted


def test_quantized_weights_are_those_of_the_host_alone(tiny, tmp_path):
    checkpoint = tiny("llama", dtype="bf16", num_layers=2, intermediate_size=128)
    formats = {t.name: "int8" if t.tensor_class == "mlp" else t.format for t in checkpoint.shape.tensors if t.is_matrix}
    own = make_plan(checkpoint.shape, checkpoint.fingerprint, formats=formats, kernel="fused_dot")
    wanted = generate(checkpoint, own, tmp_path)
    for homes in ("device", "host", "disk"):
        decision = make_decision(checkpoint.shape, homes=homes)
        decision = replace(decision, formats={"mlp": "int8"}, prefill_products="fused_dot", decode_products="fused_dot")
        assert generate(checkpoint, device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS), tmp_path) == wanted


def test_scores_and_first_logits(tiny, tmp_path):
    checkpoint = tiny("llama", num_layers=2)
    texts = prompts(checkpoint.shape.vocab_size, (30, 12, 5))
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, kernel="fp32")) as engine:
        scores, logits = engine.score(texts, num_decoded=3), engine.first_logits(texts)
    decision = make_decision(checkpoint.shape, kv=PLACES[3], hidden="host")
    with Engine(checkpoint, device_plan(checkpoint, decision, (30, 12, 5), 4), cache=tmp_path) as engine:
        for one, other in zip(engine.score(texts, num_decoded=3), scores, strict=True):
            assert torch.equal(one.log_probabilities, other.log_probabilities)
        assert torch.equal(engine.first_logits(texts), logits)


def test_rows_that_end_early(tiny, tmp_path):
    """A micro-batch that has finished has nothing more to do; its resources go on with the others."""
    checkpoint = tiny("llama", num_layers=2)
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    requests = [Request(str(i), tuple(text), 1 + 3 * (i % 3)) for i, text in enumerate(texts)]
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, kernel="fp32")) as engine:
        wanted = engine.generate(requests)
    decision = make_decision(checkpoint.shape, kv=PLACES[4], hidden="host", micro_batch=1, num_micro_batches=3, homes="disk")
    with Engine(checkpoint, device_plan(checkpoint, decision, LENGTHS, 7), cache=tmp_path) as engine:
        assert engine.generate(requests) == wanted


def test_the_arena_refuses_what_it_has_no_room_for(tiny, tmp_path):
    checkpoint, before = tiny("llama", num_layers=2), threading.active_count()
    decision = make_decision(checkpoint.shape, homes="device")
    planned = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS).predicted.peak_bytes["device"]
    generate(checkpoint, device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS, memory_bytes=planned), tmp_path)
    for share in (0.1, 0.5):
        plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS, memory_bytes=int(planned * share))
        with pytest.raises(StatedError, match="The device has .* do not fit"):
            generate(checkpoint, plan, tmp_path)
    assert threading.active_count() == before


def test_a_failing_copy_is_told_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    checkpoint, before = tiny("llama", num_layers=2), threading.active_count()
    plan = device_plan(checkpoint, make_decision(checkpoint.shape, kv=PLACES[2]), LENGTHS, NEW_TOKENS)
    copies, copy = [], HeldLink.copy

    def fail(*arguments):
        copies.append(0)
        if len(copies) == 100:
            raise StatedError("The link is broken.")
        copy(*arguments)

    monkeypatch.setattr(HeldLink, "copy", fail)
    with pytest.raises(StatedError, match="The link is broken."):
        generate(checkpoint, plan, tmp_path)
    assert threading.active_count() == before and list((tmp_path / "kv").iterdir()) == []


def test_a_link_is_held_to_its_rate():
    """4 MiB at 40 MiB/s, two copies at once: nothing is gained by it."""
    device = EmulatedAccelerator(2**30, 40 * 2**20)
    try:
        source, target = torch.ones(2**21, dtype=torch.uint8), torch.zeros(2**21, dtype=torch.uint8)
        begin = time.perf_counter()
        up = [device.upload.enqueue(lambda: device.to_device(target, source)) for _ in range(2)]
        down = device.download.enqueue(lambda: device.to_host(torch.empty_like(source), source), up[:1])
        for event in (*up, down):
            event.wait()
        assert 0.1 <= time.perf_counter() - begin < 0.3 and torch.equal(source, target)
        assert down.begin_s >= up[0].end_s and device.up.moved_bytes == 2**22
    finally:
        device.close()
