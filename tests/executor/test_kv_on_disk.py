"""Keys and values on the disk: the run is the one in memory, token for token; nothing is left behind; a full disk is told."""

from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
import pytest
import torch

from lmoffload.executor import Engine, Request, spill
from lmoffload.executor.kv_cache import LayerCache
from lmoffload.executor.reader import DiskReader
from lmoffload_solver.counting import kv_bytes, spilled
from lmoffload_solver.errors import StatedError
from lmoffload_solver.formats import KV_FORMATS
from lmoffload_solver.memory import breakdown, spilled_of, staging_bytes
from lmoffload_solver.model import LayerShape
from lmoffload_solver.plan import KVFormat
from lmoffload_solver.schedule import PAGE_BYTES, block_tasks, units_of
from lmoffload_solver.search import Infeasible, Optimal, solve
from lmoffload_solver.simulate import walk
from lmoffload_solver.workload import Limits, Workload
from tests.cli.machines import machine
from tests.executor.plans import make_plan
from tests.executor.reference import prompts

LENGTHS, NEW_TOKENS = (40, 30, 17, 5, 3), 8


def plan_on_disk(checkpoint, homes, *, new_tokens=NEW_TOKENS, **choices):
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, tokens=100, **choices)
    kv = plan.kv.model_copy(update={"homes": tuple((layer, batch, "disk") for layer, batch in homes)})
    plan = plan.model_copy(update={"kv": kv, "workload": Workload.of_lengths(LENGTHS, new_tokens)})
    on_disk = sum(one.num_bytes for one in spilled_of(checkpoint.shape, plan).values())
    return plan.model_copy(update={"kv": kv.model_copy(update={"bytes": {**kv.bytes, "disk": on_disk}})})


def generate(checkpoint, plan, cache, new_tokens=NEW_TOKENS):
    texts = prompts(checkpoint.shape.vocab_size, LENGTHS)
    with Engine(checkpoint, plan, cache=cache) as engine:
        done = engine.generate([Request(str(i), tuple(text), max(1, new_tokens - i)) for i, text in enumerate(texts)])
        return [one.token_ids for one in done], dict(engine.meter.counts)


def test_a_plan_of_the_planner(tiny, tmp_path):
    """In the least memory that the planner can do with, keys and values go to the disk; the tokens are those with all in memory."""
    checkpoint = tiny("llama", num_layers=3)
    texts = prompts(checkpoint.shape.vocab_size, range(300, 240, -5))
    work = Workload.of_lengths([len(text) for text in texts], 4)

    def solved(host_memory_bytes):
        limits = Limits(micro_batch=1, num_micro_batches=len(texts), host_memory_bytes=host_memory_bytes)
        return solve(checkpoint.shape, machine(), work, limits, model_fingerprint=checkpoint.fingerprint)

    too_little = solved(2**20)
    assert isinstance(too_little, Infeasible)
    found = []
    for host, on_disk in ((None, False), (2**20 + too_little.short_by_bytes, True)):
        outcome = solved(host)
        assert isinstance(outcome, Optimal) and ("disk" in outcome.plan.kv.bytes) == on_disk
        with Engine(checkpoint, outcome.plan, cache=tmp_path) as engine:
            done = engine.generate([Request(str(i), tuple(text), 4) for i, text in enumerate(texts)])
            found.append([one.token_ids for one in done])
            assert (engine.meter.counts.get("load_kv", 0) > 0) == on_disk
    assert found[0] == found[1]


ALL = [(layer, batch) for layer in range(3) for batch in range(2)]


@pytest.mark.parametrize(("kv", "homes"), [
    (("fp32", "fp32"), ALL), (("int8", "int4-g32"), ALL), (("bf16", "bf16"), [(1, 0)]), (("int4-g32", "fp32"), [(0, 1), (2, 0), (2, 1)]),
])  # fmt: skip
def test_the_run_in_memory_and_on_the_disk_are_one(tiny, tmp_path, kv, homes, monkeypatch):
    """Layers with windows and without, all streamed, a group of keys that fills up, and a disk that takes its time."""
    checkpoint = tiny("gemma3", num_layers=3)
    expected, _ = generate(checkpoint, plan_on_disk(checkpoint, [], kv=kv), tmp_path)
    chance, read, write = random.Random(0), DiskReader.read, spill.SpillFile.write_from

    def late(function):
        def call(*arguments):
            time.sleep(0.003 * (chance.random() < 0.1))
            function(*arguments)
            time.sleep(0.003 * (chance.random() < 0.1))

        return call

    monkeypatch.setattr(DiskReader, "read", late(read))
    monkeypatch.setattr(spill.SpillFile, "write_from", late(write))
    before = threading.active_count()
    plan = plan_on_disk(checkpoint, homes, kv=kv, resident=set())
    found, counts = generate(checkpoint, plan, tmp_path)
    assert found == expected
    assert counts["load_kv"] >= len(homes) * (NEW_TOKENS - 1) and counts["store_kv"] > 0
    assert threading.active_count() == before and list((tmp_path / "kv").iterdir()) == []


@pytest.mark.parametrize("kind", KV_FORMATS)
def test_what_a_step_changes_is_stored(kind):
    """Every changed byte lies in a page that is written, and little else is; 31 fills a group of keys, at 1990 the ring has turned."""
    formats, lengths = KVFormat(key=kind, value=kind), [2000, 2000, 40]
    generator, rows = torch.Generator().manual_seed(0), np.array([0, 2])
    for window, place in ((None, 31), (None, 1), (1000, 1990)):
        shape = LayerShape(num_heads=4, num_kv_heads=2, key_dim=80, value_dim=48, window=window)
        memory = torch.zeros(spilled(shape, lengths, kind, kind).num_bytes, dtype=torch.uint8)
        cache = LayerCache.allocate(shape, lengths, formats, on_disk=True).within(memory)
        positions, before = np.array([place, min(place, 31)]), memory.clone()
        pages = cache.pages(rows, positions)
        for kept, dim in ((cache.keys, 80), (cache.values, 48)):
            kept.store_tokens(rows, positions, torch.randn(2, 2, dim, generator=generator))
        written = torch.zeros_like(memory, dtype=torch.bool)
        for begin, end in pages:
            assert begin % PAGE_BYTES == end % PAGE_BYTES == 0
            written[begin:end] = True
        changed = before != memory
        assert changed.any() and not (changed & ~written).any()
        assert len(pages) > 1 and int(written.sum()) < memory.numel() / 2


def test_chunks_and_disk(tiny, tmp_path):
    checkpoint = tiny("llama", num_layers=2)
    expected, _ = generate(checkpoint, plan_on_disk(checkpoint, []), tmp_path, 4)
    plan = plan_on_disk(checkpoint, [(0, 0), (1, 0), (1, 1)], new_tokens=4).model_copy(update={"prefill_chunk": 24})
    assert generate(checkpoint, plan, tmp_path, 4)[0] == expected


def test_failures_are_told_and_leave_nothing(tiny, tmp_path, monkeypatch):
    checkpoint = tiny("llama", num_layers=2)
    plan, before = plan_on_disk(checkpoint, [(0, 0), (1, 1)], new_tokens=4), threading.active_count()

    def full(*_):
        raise OSError(28, "No space left on device")

    for name, word in (("posix_fallocate", "bytes on the disk of"), ("pwritev", "Writing keys and values")):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(StatedError, match=f"{word}.*"):
                generate(checkpoint, plan, tmp_path, 4)
        assert threading.active_count() == before and list((tmp_path / "kv").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StatedError, match="cannot be kept in"):
        generate(checkpoint, plan, tmp_path / "file", 4)


@pytest.mark.parametrize(("homes", "stream", "word"), [
    ([(0, 0)], "matrix", "cuts layers"), ([(0, 0), (0, 0)], "layer", "two homes"), ([(0, 5)], "layer", "no such pair"),
])  # fmt: skip
def test_plans_that_do_not_hold(tiny, homes, stream, word):
    checkpoint = tiny("llama", num_layers=2)
    with pytest.raises(StatedError, match=word):
        Engine(checkpoint, plan_on_disk(checkpoint, homes, stream=stream))
    plan = plan_on_disk(checkpoint, [(0, 0)])
    with pytest.raises(StatedError, match="keys and values on the disk take"):
        Engine(checkpoint, plan.model_copy(update={"kv": plan.kv.model_copy(update={"bytes": {"disk": 1}})}))


def test_memory_counts_homes_and_staging(tiny):
    shape = tiny("llama", num_layers=2).shape
    checkpoint = tiny("llama", num_layers=2)
    inside, outside = (plan_on_disk(checkpoint, homes) for homes in ([], [(0, 0), (1, 0)]))
    staging = staging_bytes(spilled_of(shape, outside))
    rows = [length + NEW_TOKENS for length in LENGTHS[:2]]
    assert breakdown(shape, inside)["kv"] - breakdown(shape, outside)["kv"] == sum(kv_bytes(shape, tokens) for tokens in rows) - staging


@pytest.mark.parametrize("homes", [ALL, [(1, 1)], [(0, 0), (2, 1)], []])
def test_the_graph(tiny, homes):
    """A buffer is used by one (layer, micro-batch) at a time, and is loaded after the same keys and values were stored."""
    checkpoint = tiny("llama", num_layers=3)
    plan = plan_on_disk(checkpoint, homes)
    steps, tasks = 4, list(block_tasks(units_of(checkpoint.shape, plan), 4, 2, 1, spilled_of(checkpoint.shape, plan)))
    assert [task.index for task in tasks] == list(range(len(tasks)))
    kinds = [task.kind for task in tasks]
    assert kinds.count("load_kv") == kinds.count("store_kv") == (steps - 1) * len(homes)
    ends = {timed.task.index: timed for timed in walk(tasks, lambda task: 1.0 + task.index % 3)}
    holder: dict[int, tuple[float, str]] = {}
    for timed in sorted((timed for timed in ends.values() if timed.task.kv_slot is not None), key=lambda timed: timed.begin_s):
        assert timed.begin_s >= holder.get(timed.task.kv_slot, (0.0, ""))[0], "a buffer is used by one task at a time"
        holder[timed.task.kv_slot] = (timed.end_s, timed.task.kind)
    stored = {(t.task.step, t.task.unit, t.task.micro_batch): t.end_s for t in ends.values() if t.task.kind == "store_kv"}
    for timed in ends.values():
        if timed.task.kind == "load_kv":
            assert timed.begin_s >= stored[timed.task.step - 1, timed.task.unit, timed.task.micro_batch]
