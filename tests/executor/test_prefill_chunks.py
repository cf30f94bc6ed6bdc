"""Prompts computed in chunks: the same tokens and the same stored bytes as computed at once, in every format and with windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmoffload.executor import Engine, Request
from lmoffload.executor.packing import pack_prompts
from lmoffload.kernels.attention import prefill_attention
from lmoffload.kernels.prefill import QUERY_BLOCK
from lmoffload_solver.blocks import CHUNK_MULTIPLE, prompt_chunks
from lmoffload_solver.errors import StatedError
from lmoffload_solver.memory import JobMemory
from lmoffload_solver.search import Optimal, solve
from lmoffload_solver.workload import Limits, Workload
from tests.cli.machines import machine
from tests.executor.plans import make_plan
from tests.executor.reference import prompts
from tests.executor.test_exactness import _frozen as frozen

LENGTHS = (1, 100, 24, 7, 60)


@pytest.mark.parametrize(("family", "kv", "stream"), [
    ("llama", ("fp32", "fp32"), "layer"), ("gemma3", ("int8", "int4-g32"), "layer"), ("mistral", ("bf16", "int8"), "matrix"),
])  # fmt: skip
def test_chunks_change_nothing(tiny, family, kv, stream):
    checkpoint = tiny(family, num_layers=3)
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    found = []
    for chunk in (None, 1, 30, 75):
        plan = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), kv=kv, micro_batch=3, stream=stream)
        with Engine(checkpoint, plan.model_copy(update={"prefill_chunk": chunk})) as engine:
            done = engine.generate([Request(str(i), tuple(text), 4) for i, text in enumerate(texts)])
            found.append(([c.token_ids for c in done], engine.first_logits(texts), engine.score(texts[1:])))
    for tokens, logits, scores in found[1:]:
        assert tokens == found[0][0] and torch.equal(logits, found[0][1])
        for one, other in zip(scores, found[0][2], strict=True):
            assert torch.equal(one.log_probabilities, other.log_probabilities) and torch.equal(one.likeliest, other.likeliest)


def test_a_planned_chunk(tiny):
    """With less memory than all prompts at once take, the planner cuts them; the tokens are those of the plan with all in memory."""
    checkpoint = tiny("llama", num_layers=3)
    texts = prompts(checkpoint.shape.vocab_size, (300, 290, 260))
    work = Workload.of_lengths([len(text) for text in texts], 4)
    plans, found = [], []
    for missing in (0, 11 * 2**20):
        limits = Limits(micro_batch=3, host_memory_bytes=plans[0].predicted.peak_bytes["host"] - missing if plans else None)
        outcome = solve(checkpoint.shape, machine(), work, limits, model_fingerprint=checkpoint.fingerprint)
        assert isinstance(outcome, Optimal)
        plans.append(outcome.plan)
        with Engine(checkpoint, outcome.plan) as engine:
            done = engine.generate([Request(str(i), tuple(text), 4) for i, text in enumerate(texts)])
            found.append([c.token_ids for c in done])
    assert plans[0].prefill_chunk is None and plans[1].prefill_chunk is not None
    assert found[0] == found[1]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.one_of(st.none(), st.integers(1, 300)))
def test_pieces_are_the_prompts(lengths, chunk):
    tokens = [[100 * row + place for place in range(length)] for row, length in enumerate(lengths)]
    packed = pack_prompts(range(len(lengths)), tokens, chunk, 4)
    pieces = [piece for one in packed for piece in one.pieces]
    assert [token for p in pieces for token in tokens[p.row][p.first : p.end]] == [token for row in tokens for token in row]
    assert QUERY_BLOCK == CHUNK_MULTIPLE and all(piece.first % QUERY_BLOCK == 0 for piece in pieces)
    assert [piece.row for piece in pieces if piece.last] == list(range(len(lengths)))
    for one in packed:
        size = one.segments[-1][1]
        assert 0 < size <= (sum(lengths) if chunk is None else max(chunk, QUERY_BLOCK)) and len(one.token_ids) == -(-size // 4) * 4
        assert [one.token_ids[place] for place in one.newest] == [tokens[p.row][-1] for p in one.pieces if p.last]
    assert len(packed) == 1 or chunk is not None
    if chunk is not None:  # the planner prices the same chunks
        sums = np.cumsum([7, *lengths])
        cut = [(one.segments[-1][1], len(one.newest)) for one in packed]
        assert prompt_chunks(sums, 0, len(lengths), chunk) == cut


@pytest.mark.parametrize("window", [None, 40])
def test_attention_goes_on_at_a_block(window):
    from lmoffload.kernels.pool import Pool

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(200, heads, 16, generator=generator) for heads in (4, 2, 2))
    with Pool(2) as pool:
        whole = prefill_attention(q, k, v, [(0, 200)], scaling=0.3, window=window, pool=pool)
        for known in (24, 96, 192):
            rest = prefill_attention(q[known:], k, v, [(0, 200)], known=known, scaling=0.3, window=window, pool=pool)
            assert torch.equal(rest, whole[known:])


def test_a_prompt_whose_embedding_follows_its_length_is_not_cut(tiny):
    rope = frozen({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    checkpoint = tiny("llama", num_layers=1, rope_parameters=rope, max_position_embeddings=32)
    assert checkpoint.shape.rotary_follows_length and not tiny("llama", num_layers=1).shape.rotary_follows_length
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint).model_copy(update={"prefill_chunk": 24})
    with pytest.raises(StatedError, match="is not cut"):
        Engine(checkpoint, plan)


def test_memory_of_chunks(tiny):
    """A layer's temporaries are those of a chunk, and less in all."""
    shape = tiny("llama", num_layers=3).shape
    job = JobMemory(shape, Workload.of_lengths([1000] * 4, 8), 1000)
    options = {"head_streams": False, "layers_cut": False}
    whole, cut = (job.parts(2, 2, 1, **options, prefill_chunk=chunk) for chunk in (None, 240))
    scores = 3 * 4 * 256 * 1000
    carried = 2 * 1000 * 4 * 2 * 2 * 16
    assert cut.phases["prefill"]["layer"] - scores - carried == (whole.phases["prefill"]["layer"] - scores) * 240 / 2000
    assert cut.phases["prefill"]["suspended"] > whole.phases["prefill"]["suspended"] and cut.phases["decode"] == whole.phases["decode"]
    assert cut.total < whole.total
