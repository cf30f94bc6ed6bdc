"""Plans for a real device, run by what computes on one: torch's operators in the checkpoint's dtype, here on torch's CPU."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

from lmoffload.executor import Engine, Request
from lmoffload.executor.plain_device import PlainDevice
from lmoffload.profiler.store import load_profile
from lmoffload_solver.chain_plan import plan_of
from lmoffload_solver.counting import main_format
from lmoffload_solver.decision import Job
from lmoffload_solver.errors import StatedError
from lmoffload_solver.workload import Limits, Workload
from tests.executor.device_plans import PLACES, device_plan, make_decision, random_decision
from tests.executor.reference import greedy, load_reference, prompts
from tests.models import FAMILIES

LENGTHS, NEW_TOKENS = (3, 17, 9, 30, 1, 5, 40, 12), 6
GIB = 2**30


class LateDevice(PlainDevice):
    """Every copy begins and ends late now and then."""

    chance = random.Random(0)

    def to_device(self, target, source):
        self.late(super().to_device, target, source)

    def to_host(self, target, source):
        self.late(super().to_host, target, source)

    def late(self, copy, *arguments):
        time.sleep(0.002 * (self.chance.random() < 0.05))
        copy(*arguments)
        time.sleep(0.002 * (self.chance.random() < 0.05))


def real_plan(checkpoint, decision, products="widen"):
    decision = replace(decision, prefill_products=products, decode_products=products)
    exact = decision.kv_format == main_format(checkpoint.shape) and not decision.formats
    work = Workload.of_lengths(list(LENGTHS), NEW_TOKENS, "exact" if exact else "any")
    machine, limits = load_profile("t4-gcp"), Limits(device_memory_bytes=4 * GIB)
    return plan_of(Job(checkpoint.shape, work), machine, decision, digest=checkpoint.fingerprint, limits=limits)


def generate(checkpoint, decision, cache, products="widen"):
    plan = real_plan(checkpoint, decision, products)
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    with Engine(checkpoint, plan, cache=cache, accelerators=[LateDevice(4 * GIB)]) as engine:
        done = engine.generate([Request(str(i), tuple(text), NEW_TOKENS) for i, text in enumerate(texts)])
        report = engine.report()
    assert not report.emulated
    assert 0 < report.measured.peak_bytes["device"] <= 4 * GIB
    return [list(one.token_ids) for one in done]


def expected(checkpoint):
    model = load_reference(checkpoint.path)
    return [greedy(model, text, NEW_TOKENS) for text in prompts(checkpoint.shape.vocab_size, LENGTHS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_placements_of_every_family(tiny, tmp_path, family):
    checkpoint, chance = tiny(family), random.Random(family)
    wanted = expected(checkpoint)
    assert generate(checkpoint, random_decision(checkpoint.shape, chance), tmp_path) == wanted


@pytest.mark.parametrize("unit", PLACES, ids=lambda unit: f"{unit.home}-{unit.attends}")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_wherever_things_lie(tiny, tmp_path, dtype, unit):
    """Equal to a run with everything on the device; attention on the host is more exact, and now and then turns a close choice."""
    checkpoint = tiny("llama", dtype=dtype, num_layers=3)
    resident = make_decision(checkpoint.shape, homes="device", kv_format=dtype)
    away = make_decision(checkpoint.shape, kv=unit, hidden="host", homes="disk", kv_format=dtype)
    one, other = (generate(checkpoint, decision, tmp_path) for decision in (resident, away))
    if unit.attends == "device":
        assert one == other
    else:
        assert sum(a == b for a, b in zip(one, other, strict=True)) >= 6


@pytest.mark.parametrize("fmt", ["int8", "int4-g32"])
def test_quantized_weights_and_keys_and_values(tiny, tmp_path, fmt):
    """Equal to what the host's kernels make of the same bytes, on an emulated device."""
    checkpoint = tiny("llama", num_layers=3, intermediate_size=128)
    plain = make_decision(checkpoint.shape, kv_format="fp32")
    narrow = replace(plain, formats={"attention": "int8", "mlp": "int8"}, kv_format=fmt)
    found = generate(checkpoint, narrow, tmp_path, "dequantizing")
    by_host = replace(narrow, prefill_products="fused_dot", decode_products="fused_dot")
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    with Engine(checkpoint, device_plan(checkpoint, by_host, LENGTHS, NEW_TOKENS), cache=tmp_path) as engine:
        done = engine.generate([Request(str(i), tuple(text), NEW_TOKENS) for i, text in enumerate(texts)])
    assert found == [list(one.token_ids) for one in done]


def test_a_machine_without_a_device(tiny):
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    checkpoint = tiny("llama", num_layers=2)
    with pytest.raises(StatedError, match="none here"):
        Engine(checkpoint, real_plan(checkpoint, make_decision(checkpoint.shape, kv_format="fp32")))
