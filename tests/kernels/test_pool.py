"""The pool: everything done on return, errors surface, nothing spins."""

import os
import signal
import threading
import time

import pytest
import torch

from lmoffload.kernels.pool import Pool


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_every_job_runs_once(threads, count):
    done = [0] * count
    with Pool(threads) as pool:
        for _ in range(20):

            def job(i: int) -> None:
                done[i] += 1

            pool.run([lambda i=i: job(i) for i in range(count)])
    assert done == [20] * count


def test_jobs_run_at_the_same_time():
    meet = threading.Barrier(3, timeout=10)
    with Pool(3) as pool:
        pool.run([meet.wait] * 3)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_surfaces_and_the_pool_lives_on(threads):
    def fail() -> None:
        raise OSError(5, "disk")

    with Pool(threads) as pool:
        for _ in range(5):
            with pytest.raises(OSError, match="disk"):
                pool.run([fail, lambda: None, lambda: None])
        done: list[int] = []
        pool.run([lambda i=i: done.append(i) for i in range(7)])
        assert sorted(done) == list(range(7))


def test_an_error_waits_for_the_jobs_that_run():
    """The buffers of a job that still runs must not be freed by its caller."""
    ended = []
    meet = threading.Barrier(2, timeout=10)

    def fail() -> None:
        meet.wait()
        raise OSError(5, "disk")

    def slow() -> None:
        meet.wait()
        time.sleep(0.1)
        ended.append(True)

    with Pool(2) as pool:
        with pytest.raises(OSError, match="disk"):
            pool.run([fail, slow])
        assert ended == [True]


def test_an_interrupt_surfaces():
    def interrupt() -> None:
        raise KeyboardInterrupt

    with Pool(2) as pool, pytest.raises(KeyboardInterrupt):
        pool.run([interrupt, interrupt])


def test_ctrl_c_while_waiting_stops_the_batch_and_waits_for_its_jobs():
    ended: list[str] = []
    meet = threading.Barrier(2, timeout=10)

    def job() -> None:
        meet.wait()
        if threading.current_thread() is threading.main_thread():
            return  # the caller: it is waiting for the worker when the signal comes
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        time.sleep(0.15)
        ended.append("worker")

    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with Pool(2) as pool:
            with pytest.raises(KeyboardInterrupt):
                pool.run([job, job])
            assert ended == ["worker"]
            pool.run([lambda: ended.append("again")] * 3)
            assert ended[1:] == ["again"] * 3
    finally:
        signal.signal(signal.SIGALRM, before)


def test_torch_is_serial_in_jobs_and_as_before_outside():
    before = torch.get_num_threads()
    seen: list[int] = []
    meet = threading.Barrier(2, timeout=10)

    def job() -> None:
        meet.wait()
        seen.append(torch.get_num_threads())

    try:
        torch.set_num_threads(2)
        with Pool(2) as pool:
            pool.run([job, job])
        assert seen == [1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_idle_workers_sleep():
    with Pool(4) as pool:
        pool.run([lambda: None] * 4)
        start = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - start < 0.1


def test_workers_are_bound_to_their_cores():
    core = min(os.sched_getaffinity(0))
    seen = {}
    meet = threading.Barrier(2, timeout=10)

    def job() -> None:
        meet.wait()
        seen[threading.current_thread().name] = os.sched_getaffinity(0)

    before = os.sched_getaffinity(0)
    with Pool(2, cores=[core, core]) as pool:
        pool.run([job, job])
    assert seen.pop("lmoffload-compute") == {core}
    assert list(seen.values()) == [before]


def test_a_closed_pool_has_no_threads():
    before = threading.active_count()
    pool = Pool(3)
    assert threading.active_count() == before + 2
    pool.close()
    pool.close()
    assert threading.active_count() == before


def test_two_callers_take_turns():
    total = []
    with Pool(2) as pool:

        def call() -> None:
            for _ in range(50):
                pool.run([lambda: total.append(1)] * 4)

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=30)
    assert len(total) == 3 * 50 * 4
