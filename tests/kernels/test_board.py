"""The board: every call once, by whoever looks, and all ended on return."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from llvmlite import ir

from lmoffload.kernels.board import Call, emit_entry
from lmoffload.kernels.code import ADDRESS, I64, Code, Compiled, host_machine
from lmoffload.kernels.pool import Pool


def count_up() -> tuple[Compiled, int]:
    """entry(place, turns): add 1 to the word at `place`, `turns` times, each seen from outside."""
    module = ir.Module("count_up")
    code = Code(module, host_machine(), "count_up", [ADDRESS, I64])
    place, turns = code.arguments
    code.each(code.whole(0), turns, 1, lambda _: code.b.atomic_rmw("add", place, code.whole(1), "monotonic") and None)
    entry = emit_entry(code.end())
    compiled = Compiled(module)
    return compiled, compiled.address(entry)


@pytest.fixture(scope="module")
def counter() -> tuple[Compiled, int]:
    return count_up()


def calls(entry: int, words: torch.Tensor, turns: int) -> list[Call]:
    return [Call(entry, (words[i:].data_ptr(), turns), (words,)) for i in range(len(words))]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_every_call_runs_once_and_has_ended(counter: tuple[Compiled, int], threads: int, count: int) -> None:
    words = torch.zeros(count, dtype=torch.int64)
    with Pool(threads) as pool:
        for time_through in range(1, 300):
            pool.run(calls(counter[1], words, 20))
            assert words.tolist() == [20 * time_through] * count
            if time_through % 100 == 0:
                time.sleep(0.01)  # so that the workers sleep, and are roused


def test_workers_take_part(counter: tuple[Compiled, int]) -> None:
    """The leader's own processor time is about half of what two threads do."""
    words = torch.zeros(8, dtype=torch.int64)
    with Pool(2) as pool:
        pool.run(calls(counter[1], words, 1))
        before_process, before_thread = time.process_time(), time.thread_time()
        pool.run(calls(counter[1], words, 5_000_000))
        process_s, thread_s = time.process_time() - before_process, time.thread_time() - before_thread
    assert words.tolist() == [5_000_001] * 8
    assert thread_s < 0.9 * process_s


def test_calls_and_jobs_in_python_mix(counter: tuple[Compiled, int]) -> None:
    words, done = torch.zeros(5, dtype=torch.int64), []
    with Pool(3) as pool:
        for _ in range(50):
            pool.run([*calls(counter[1], words, 3), lambda: done.append(threading.get_ident())])
            pool.run([lambda: done.append(0)] * 4)
    assert words.tolist() == [150] * 5 and len(done) == 250


def test_arguments_of_two_functions_are_refused(counter: tuple[Compiled, int]) -> None:
    other, words = count_up(), torch.zeros(1, dtype=torch.int64)
    with Pool(2) as pool, pytest.raises(AssertionError, match="one function"):
        pool.run([*calls(counter[1], words, 1), *calls(other[1], words, 1)])
