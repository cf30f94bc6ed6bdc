"""The host's attention in several streams: every row as in one, and the threads are those of the plan."""

from __future__ import annotations

import numpy as np
import pytest

from lmoffload.executor import Engine, Request
from lmoffload.executor.attention_streams import shares
from lmoffload_solver.errors import StatedError
from tests.executor.device_plans import PLACES, device_plan, make_decision
from tests.executor.reference import prompts

LENGTHS, NEW_TOKENS = (3, 17, 9, 30, 1, 40), 5


@pytest.mark.parametrize(
    ("lengths", "count", "sizes"), [([5, 5, 5, 5], 2, [2, 2]), ([90, 1, 1, 1], 3, [1, 1, 2]), ([1, 1, 90], 2, [2, 1]), ([7], 4, [1])]
)
def test_rows_are_shared_out_by_length(lengths, count, sizes):
    found = shares(np.array(lengths), count)
    assert [len(part) for part in found] == sizes and [row for part in found for row in part] == list(range(len(lengths)))


def test_streams_attend_as_one_does(tiny, tmp_path):
    checkpoint = tiny("gemma3", num_layers=3)
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    requests = [Request(str(i), tuple(text), NEW_TOKENS) for i, text in enumerate(texts)]
    tokens = []
    for streams, threads in ((1, 1), (2, 2), (3, 6)):
        decision = make_decision(checkpoint.shape, kv=PLACES[3], micro_batch=4)
        plan = device_plan(checkpoint, decision, LENGTHS, NEW_TOKENS)
        attention = plan.attention.model_copy(update={"streams": streams})
        plan = plan.model_copy(update={"attention": attention, "threads": {**plan.threads, "host_attention": threads}})
        with Engine(checkpoint, plan, cache=tmp_path) as engine:
            tokens.append([one.token_ids for one in engine.generate(requests)])
            report = engine.report()
        assert report.threads["host_attention"].planned == threads and report.threads["host_attention"].cpu_s > 0
    assert tokens[0] == tokens[1] == tokens[2]


def test_more_streams_than_threads_are_refused(tiny, tmp_path):
    checkpoint = tiny("gemma3", num_layers=3)
    plan = device_plan(checkpoint, make_decision(checkpoint.shape, kv=PLACES[3]), LENGTHS, NEW_TOKENS)
    wrong = plan.model_copy(update={"attention": plan.attention.model_copy(update={"streams": 2})})
    with pytest.raises(StatedError, match="2 streams of attention with 1 threads"):
        Engine(checkpoint, wrong, cache=tmp_path)
