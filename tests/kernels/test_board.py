"""The board: every call once, by whoever looks, and all ended on return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from llvmlite import ir

from lmoffload.kernels.board import Call, emit_entry
from lmoffload.kernels.code import ADDRESS, I64, Code, Compiled, host_machine
from lmoffload.kernels.pool import Pool
from lmoffload.kernels.runs import Rooms, Runs


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


def test_runs_put_off_are_done_in_order_and_again(counter: tuple[Compiled, int]) -> None:
    """Each run ends before the next begins: 40 calls add to one word, and 40 others copy what they find there by adding it up."""
    words, told = torch.zeros(40, dtype=torch.int64), list[float]()
    with Pool(3) as pool:

        def work() -> torch.Tensor:
            pool.timed(lambda: pool.run(calls(counter[1], words, 2)), told.append)
            pool.run(calls(counter[1], words[:7], 5))
            assert words.sum() == 0, "nothing is done before the end"
            return words

        result, runs = pool.together(work, Rooms())
        assert result is words and words.tolist() == [7] * 7 + [2] * 33 and runs is not None
        pool.again(runs)
        assert words.tolist() == [14] * 7 + [4] * 33
        assert len(told) == 2 and all(0 < seconds < 1 for seconds in told)


def test_what_is_more_than_runs_is_not_done_again(counter: tuple[Compiled, int]) -> None:
    words, seen = torch.zeros(4, dtype=torch.int64), list[list[int]]()
    with Pool(2) as pool:
        for break_off in (pool.settle, lambda: pool.run([lambda: None])):

            def work(break_off: Callable[[], None] = break_off) -> None:
                pool.run(calls(counter[1], words, 1))
                break_off()
                seen.append(words.tolist())
                pool.run(calls(counter[1], words, 1))

            assert pool.together(work, Rooms())[1] is None
    assert seen == [[1] * 4, [3] * 4] and words.tolist() == [4] * 4


def test_what_was_put_off_is_dropped_where_the_work_fails(counter: tuple[Compiled, int]) -> None:
    words = torch.zeros(4, dtype=torch.int64)
    with Pool(2) as pool:

        def work() -> None:
            pool.run(calls(counter[1], words, 1))
            raise OSError(5, "disk")

        with pytest.raises(OSError, match="disk"):
            pool.together(work, Rooms())
        pool.run(calls(counter[1], words[:2], 3))
    assert words.tolist() == [3, 3, 0, 0]


def test_another_thread_runs_at_once(counter: tuple[Compiled, int]) -> None:
    """What one thread puts off is not another's."""
    words = torch.zeros(4, dtype=torch.int64)
    with Pool(2) as pool:

        def work() -> list[int]:
            pool.run(calls(counter[1], words[:1], 1))
            other = threading.Thread(target=lambda: pool.run(calls(counter[1], words[1:], 2)))
            other.start()
            other.join()
            return words.tolist()

        assert pool.together(work, Rooms())[0] == [0, 2, 2, 2]
    assert words.tolist() == [1, 2, 2, 2]


def test_rooms_are_shared_by_works_of_the_same_sizes() -> None:
    rooms, found = Rooms(), []
    for shape in ((2, 3), (2, 3), (2, 4)):
        rooms.begin()
        found.append([rooms.take(shape, torch.float32), rooms.take((5,), torch.uint8)])
    (first, second), (again, other), (larger, last) = found
    assert first is again and second is other is last and larger is not first and first.data_ptr() != second.data_ptr()


def test_arguments_of_two_functions_are_refused(counter: tuple[Compiled, int]) -> None:
    other, words = count_up(), torch.zeros(1, dtype=torch.int64)
    with Pool(2) as pool, pytest.raises(AssertionError, match="one function"):
        pool.run([*calls(counter[1], words, 1), *calls(other[1], words, 1)])


def test_works_beside_each_other_share_stages(counter: tuple[Compiled, int]) -> None:
    """Works of two runs and of one, between two that stand alone; a shared stage's time is told by size."""
    words, told = torch.zeros(9, dtype=torch.int64), dict[str, float]()
    with Pool(2) as pool:

        def lane(name: str, first: int, turns: tuple[int, ...], size: float) -> str:
            def run() -> None:
                for number in turns:
                    pool.run(calls(counter[1], words[first : first + 2], number))

            pool.timed(run, lambda seconds: told.__setitem__(name, seconds), size)
            return name

        def work() -> list[str]:
            pool.run(calls(counter[1], words[8:], 5))
            lanes = ("a", 0, (1, 20), 1.0), ("b", 2, (2, 30), 3.0), ("c", 4, (3,), 4.0)
            names = pool.beside([lambda lane_of=one: lane(*lane_of) for one in lanes])  # type: ignore[misc]
            pool.run(calls(counter[1], words[6:8], 7))
            return names

        names, runs = pool.together(work, Rooms())
    assert names == ["a", "b", "c"] and words.tolist() == [21, 21, 32, 32, 3, 3, 7, 7, 5]
    assert runs is not None and runs.program is not None and runs.program.num_stages == 4
    first, second = (end - begin for begin, end in runs.spans([1, 2, 3])[1:])
    assert told == pytest.approx({"a": first / 8 + second / 4, "b": first * 3 / 8 + second * 3 / 4, "c": first / 2})


def test_works_beside_each_other_of_which_one_must_wait(counter: tuple[Compiled, int]) -> None:
    words = torch.zeros(3, dtype=torch.int64)
    with Pool(2) as pool:

        def waiting() -> int:
            pool.run(calls(counter[1], words[1:2], 1))
            pool.settle()
            return int(words[1])

        works: list[Callable[[], object]] = [lambda: pool.run(calls(counter[1], words[:1], 1)), waiting]
        assert pool.beside(works) == [None, 1]
        assert pool.together(lambda: pool.beside(works), Rooms()) == ([None, 2], None)
    assert words.tolist() == [2, 2, 0]


def test_runs_in_a_row(counter: tuple[Compiled, int]) -> None:
    words, told = torch.zeros(4, dtype=torch.int64), list[float]()
    with Pool(2) as pool:

        def work(first: int) -> None:
            pool.timed(lambda: pool.run(calls(counter[1], words[first : first + 2], 3)), told.append)

        parts = [pool.together(lambda first=first: work(first), Rooms())[1] for first in (0, 2)]  # type: ignore[misc]
        row, ends = Runs.in_a_row([one for one in parts if one is not None])
        told.clear()
        pool.again(row)
    spans = row.spans(ends)
    assert words.tolist() == [6] * 4 and ends == [1, 2]
    assert told == pytest.approx([end - begin for begin, end in spans]) and spans[0][1] == spans[1][0]
