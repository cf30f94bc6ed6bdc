"""Few tokens' layers, recorded and done again: the same tokens, whatever lies where, and nothing but runs in a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmoffload.executor import Engine, Request
from lmoffload.kernels.pool import Pool
from lmoffload.modeling.recorder import Record, Recorder
from lmoffload.modeling.runtime import Runtime
from lmoffload_solver.memory import RECORDED_SIZES
from tests.executor.plans import make_plan
from tests.executor.reference import greedy, load_reference, prompts

LENGTHS, NEW_TOKENS = (5, 3, 17, 9, 12), 7
WHOLE = {"head_dim": 64, "intermediate_size": 128}
"""Sizes whose tokens are not padded."""
FREE = {
    f"aten.{name}.default"
    for name in ("view", "_unsafe_view", "unsqueeze", "alias", "detach", "t", "expand", "split_with_sizes", "_reshape_alias", "lift_fresh")
} | {"aten.slice.Tensor", "aten.select.int", "aten.transpose.int", "aten.empty.memory_format", "aten.view.dtype", "aten.reshape.default"}
"""What touches no number."""


class _NothingIsRead(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert str(function) in FREE, f"{function} within a record"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many pieces of layers were said anew, and how many done again."""
    counts: Counter[str] = Counter()
    together, again = Pool.together, Pool.again

    def counted(self: Pool, work: Callable[[], Any], rooms: Any) -> Any:
        def watched() -> Any:
            with _NothingIsRead():
                return work()

        counts["said"] += 1
        counts["again"] -= 1  # it is done by `again` the first time, too
        result, runs = together(self, watched, rooms)
        assert runs is not None
        return result, runs

    def counted_again(self: Pool, runs: Any) -> None:
        counts["again"] += 1
        again(self, runs)

    monkeypatch.setattr(Pool, "together", counted)
    monkeypatch.setattr(Pool, "again", counted_again)
    return counts


def run(checkpoint: Any, **choices: Any) -> list[list[int]]:
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, kernel="fused_dot", **choices)) as engine:
        done = engine.generate([Request(str(i), tuple(text), max(1, NEW_TOKENS - i)) for i, text in enumerate(texts)])
    return [list(one.token_ids) for one in done]


def expected(checkpoint: Any) -> list[list[int]]:
    model = load_reference(checkpoint.path)
    return [greedy(model, text, max(1, NEW_TOKENS - i)) for i, text in enumerate(prompts(checkpoint.shape.vocab_size, LENGTHS))]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(("micro_batch", "count"), [(1, 1), (2, 2), (5, 1)])
def test_the_tokens_of_transformers(tiny, seen, family, micro_batch, count):
    checkpoint = tiny(family, num_layers=2, **WHOLE)
    assert run(checkpoint, micro_batch=micro_batch, num_micro_batches=count) == expected(checkpoint)
    assert seen["said"] > 0 and (seen["again"] > 0 or micro_batch == 5), "rows of five lengths, of which one goes after the other"


def test_one_stream_is_done_in_one_go(tiny, seen):
    """Its first step in parts, its second a layer in one piece, then all layers at once."""
    checkpoint, parts, layers = tiny("llama", num_layers=3, **WHOLE), 2, 3
    assert run(checkpoint, micro_batch=1, num_micro_batches=1) == expected(checkpoint)
    steps = [max(1, NEW_TOKENS - i) - 1 for i in range(len(LENGTHS))]
    sizes = len(set(LENGTHS)) + 1
    assert seen["said"] == layers * (parts * sizes + len(steps)), "each prompt's length and single tokens; and each prompt's second step"
    assert seen["again"] == layers * parts * (len(steps) - 1) + sum(count - 2 for count in steps)


def test_layers_in_one_go_begin_where_weights_stay(tiny, seen):
    checkpoint = tiny("llama", num_layers=5, **WHOLE)
    resident = {tensor.name for tensor in checkpoint.shape.tensors if tensor.layer in (0, 1, 3, 4)}
    assert run(checkpoint, micro_batch=1, num_micro_batches=1, resident=resident) == expected(checkpoint)
    chains = [count - 2 for count in (max(1, NEW_TOKENS - i) - 1 for i in range(len(LENGTHS)))]
    assert seen["again"] >= 2 * sum(chains), "two pairs of layers"


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 1), (1, 1, 1)])
def test_rows_of_several_micro_batches_are_done_in_one_go(tiny, seen, sizes):
    """Which layer follows which is known from a block of one micro-batch; then micro-batches take turns at each layer, more numbers of
    tokens among them than records are kept of, and none goes through a layer twice."""
    checkpoint, steps = tiny("llama", num_layers=3, **WHOLE), 8
    texts = prompts(checkpoint.shape.vocab_size, tuple(4 + i for i in range(max(sizes) + 3 * max(sizes))))
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, kernel="fused_dot", micro_batch=max(sizes), num_micro_batches=3)
    most = max(sizes)
    counts = [steps if i % most < size else 1 for size_index, size in enumerate(sizes) for i in range(most)]
    with Engine(checkpoint, plan) as engine:
        alone = engine.generate([Request("alone", tuple(texts[0]), steps)])
        asked = [Request(str(i), tuple(text), count) for i, (text, count) in enumerate(zip(texts[1:], counts, strict=False))]
        done = engine.generate(asked)
    model = load_reference(checkpoint.path)
    assert list(alone[0].token_ids) == greedy(model, texts[0], steps)
    assert [list(one.token_ids) for one in done] == [greedy(model, list(one.token_ids), one.max_new_tokens) for one in asked]
    assert seen["again"]


def test_growing_beyond_what_was_reckoned_with(tiny, seen):
    """A row grows to four times its length: its work is said anew as often as it doubles."""
    checkpoint = tiny("llama", num_layers=2, **WHOLE)
    (text,) = prompts(checkpoint.shape.vocab_size, (50,))
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, kernel="fused_dot", micro_batch=1)) as engine:
        (done,) = engine.generate([Request("0", tuple(text), 100)])
    assert list(done.token_ids) == greedy(load_reference(checkpoint.path), text, 100)
    assert seen["said"] == 2 * (2 + 2 + 3), "prompt, one token, and below 64, below 128 and above"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_weights_that_come_from_the_disk(tiny, seen, depth):
    """A layer's weights lie in another buffer at another step."""
    checkpoint = tiny("llama", num_layers=3, **WHOLE)
    resident = {tensor.name for tensor in checkpoint.shape.tensors if tensor.layer == 1}
    assert run(checkpoint, resident=resident, prefetch_depth=depth) == expected(checkpoint)
    assert seen["said"] > 0


def test_layers_that_are_cut_are_not_recorded(tiny, seen):
    checkpoint = tiny("llama", num_layers=2, **WHOLE)
    assert run(checkpoint, resident=set(), stream="matrix") == expected(checkpoint)
    assert not seen


def test_the_sizes_used_last_are_kept():
    layer = torch.nn.Linear(1, 1)
    with Pool(1) as pool:
        recorder, records = Recorder(cast(Runtime, None), pool), list[Record]()
        for tokens in (3, 1, 2, 1, 3, 1):
            with recorder.record(layer, tokens) as record:
                (given,) = record.take(torch.full((tokens,), 7.0))
                assert record.do(given.sum) == 7 * tokens
            records.append(record)
    assert RECORDED_SIZES == 2
    assert records[1] is records[3] is records[5], "one token was among the last two sizes all along"
    assert records[4] is not records[0], "three tokens were not"


def test_a_record_that_was_broken_off_is_not_used():
    layer = torch.nn.Linear(1, 1)
    with Pool(1) as pool:
        recorder = Recorder(cast(Runtime, None), pool)
        with pytest.raises(OSError, match="disk"), recorder.record(layer, 1) as broken:
            broken.do(lambda: None)
            raise OSError(5, "disk")
        with recorder.record(layer, 1) as record:
            assert record is not broken


def test_a_row_of_bias_is_added_to_every_row():
    from lmoffload.kernels.elementwise import add_to_rows

    generator = torch.Generator().manual_seed(0)
    for rows, n in ((1, 1), (3, 17), (70, 1000)):
        into, row = torch.randn(rows, n, generator=generator), torch.randn(n, generator=generator)
        with Pool(2) as pool:
            assert torch.equal(into + row, add_to_rows(into.clone(), row, pool))
