"""What a run performed is counted right, whatever its micro-batches and chunks."""

from __future__ import annotations

import pytest

from lmoffload.executor import Engine, Request
from lmoffload_solver import counting
from lmoffload_solver.performed import Performed
from tests.executor.plans import make_plan

LENGTHS, NEW_TOKENS = (100, 70, 30), 5


def run(checkpoint, chunk: int | None, **choices) -> Performed:
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, **choices).model_copy(update={"prefill_chunk": chunk})
    with Engine(checkpoint, plan) as engine:
        requests = [Request(str(i), tuple(range(1, length + 1)), NEW_TOKENS) for i, length in enumerate(LENGTHS)]
        engine.generate(requests)
        report = engine.report()
    assert report.performed is not None
    for kind in ("compute", "read_weights"):
        told = sum(figures[kind].measured_s for figures in report.phases.values())
        assert told == pytest.approx(report.tasks[kind].measured_s if kind in report.tasks else 0.0)
    return report.performed


@pytest.mark.parametrize(("micro_batch", "chunk", "forwards"), [(3, None, 1), (1, None, 3), (3, 48, 5)])
def test_amounts(tiny, micro_batch, chunk, forwards):
    checkpoint = tiny("llama", vocab_size=128)
    shape = checkpoint.shape
    work = run(checkpoint, chunk, resident=set(), micro_batch=micro_batch, num_micro_batches=3 // micro_batch)
    layer = shape.layers[0]
    prefill = shape.num_layers * sum(counting.prefill_attention_flops(layer, length) for length in LENGTHS)
    assert sum(a.amount for a in work.attentions if a.phase == "prefill") == pytest.approx(prefill, rel=0.03)
    decode = shape.num_layers * sum(
        counting.decode_attention_bytes(layer, length + step) for length in LENGTHS for step in range(1, NEW_TOKENS)
    )
    assert sum(a.amount for a in work.attentions if a.phase == "decode") == pytest.approx(decode, rel=0.03)
    others = {one.phase: one for one in work.others}
    assert {phase: one.rows for phase, one in others.items()} == {"prefill": 3, "decode": 3 * (NEW_TOKENS - 1)}
    assert all(one.layers == shape.num_layers * one.steps for one in others.values())
    assert others["prefill"].steps == forwards
    linears = counting.num_linears(shape, 0)
    for phase, one in others.items():
        in_layers = sum(p.count for p in work.products if p.phase == phase and p.n != shape.vocab_size)
        assert in_layers >= linears * one.layers
    matrices = [shape.head, *(tensor for tensor in shape.tensors if tensor.is_matrix and tensor.layer is not None)]
    for phase, steps in (("prefill", 1), ("decode", NEW_TOKENS - 1)):
        assert sum(r.num_bytes * r.count for r in work.reads if r.phase == phase) == steps * sum(map(counting.tensor_bytes, matrices))
