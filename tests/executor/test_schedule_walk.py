"""The overlapped walk equals the plain one, whatever the depth, the number of layers, and the delays of the disk."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import Literal

import pytest

from lmoffload.executor import Engine, Request, block
from lmoffload.executor.reader import DiskReader
from lmoffload_solver.errors import StatedError
from lmoffload_solver.schedule import block_tasks
from tests.executor.plans import make_plan
from tests.executor.reference import prompts


def generate(checkpoint, **choices) -> list[tuple[int, ...]]:
    texts = prompts(checkpoint.shape.vocab_size, (4, 11, 2, 7, 3))
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, **choices)) as engine:
        return [completion.token_ids for completion in engine.generate([Request(str(i), tuple(t), 4) for i, t in enumerate(texts)])]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 7])
def test_random_delays_in_the_reader_change_nothing(tiny, num_layers, monkeypatch):
    checkpoint = tiny("llama", num_layers=num_layers)
    expected = generate(checkpoint, resident=None)
    chance = random.Random(num_layers)
    read = DiskReader.read

    def late(self, extents, buffer):
        before, after = (chance.random() * 0.004 if chance.random() < 0.1 else 0.0 for _ in range(2))
        time.sleep(before)
        read(self, extents, buffer)
        time.sleep(after)

    monkeypatch.setattr(DiskReader, "read", late)
    for place, depth in enumerate((0, 1, 2, 4)):
        micro_batch, num_micro_batches = ((1, 1), (2, 2), (5, 1))[(num_layers + place) % 3]
        stream: Literal["layer", "matrix"] = "layer" if (num_layers // 2 + place) % 2 else "matrix"
        choices = {"prefetch_depth": depth, "micro_batch": micro_batch, "num_micro_batches": num_micro_batches, "stream": stream}
        assert generate(checkpoint, resident=set(), **choices) == expected, choices


@pytest.mark.parametrize("edges_cut", [False, True])
def test_the_edges_keep_a_buffer_until_it_is_free(tiny, monkeypatch, edges_cut):
    """Reads handed over far ahead of their turn: right with the graph's edges, wrong without them."""
    checkpoint = tiny("llama", num_layers=5)
    expected = generate(checkpoint, resident=None)

    def hurried(*arguments):
        tasks = list(block_tasks(*arguments))
        last_read = -1
        for place, task in enumerate(tasks):
            if task.kind == "read_weights":
                del tasks[place]
                last_read = max(last_read + 1, place - 7)
                tasks.insert(last_read, replace(task, depends_on=()) if edges_cut else task)
        return iter(tasks)

    monkeypatch.setattr(block, "block_tasks", hurried)
    got = generate(checkpoint, resident=set(), prefetch_depth=1)
    assert (got == expected) is not edges_cut


def test_an_error_of_the_device_surfaces_and_all_threads_end(tiny, monkeypatch):
    checkpoint = tiny("llama")
    before = threading.active_count()
    read, count = DiskReader.read, [0]

    def failing(self, extents, buffer):
        count[0] += 1
        if count[0] == 20:
            raise StatedError("Reading model.safetensors at byte 0 failed: Input/output error.")
        read(self, extents, buffer)

    monkeypatch.setattr(DiskReader, "read", failing)
    done = []
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=1, num_micro_batches=1)
    with pytest.raises(StatedError, match="Input/output error"), Engine(checkpoint, plan) as engine:
        engine.generate([Request(str(i), (5, 6, 7), 2) for i in range(8)], on_done=done.append)
    assert len(done) == 1, "what finished before the error is kept"
    assert threading.active_count() == before


def test_an_interrupt_in_the_middle_leaves_no_thread(tiny):
    checkpoint = tiny("llama")
    before = threading.active_count()

    def interrupt(progress):
        if progress.step == 2:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set())) as engine,
    ):
        engine.generate([Request("a", (5, 6, 7), 9)], on_progress=interrupt)
    assert threading.active_count() == before
