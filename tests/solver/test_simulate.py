"""The recurrence, by hand and against its task-by-task form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmoffload_solver.schedule import Piece, Task, Unit, block_tasks, num_slots
from lmoffload_solver.simulate import StepWork, busy_seconds, pipeline, step_ends, walk


def make_units(streams: list[bool]) -> tuple[Unit, ...]:
    return tuple(Unit(i, "layer", i, (Piece(str(i), 0, 1, 8192),) if streaming else ()) for i, streaming in enumerate(streams))


def test_two_buffers_by_hand() -> None:
    """Three units of 4 s to read and 1, 6, 1 s to compute: the third is read while the second computes, the fourth read waits for
    nothing."""
    work = StepWork((4, 4, 4), (1, 6, 1))
    # reads end at 4, 8, 12; computes end at 5, 14, 15. Second step: reads end at 18 (buffer free at 14), 22 (free at 15), 26.
    # computes end at 19, 28, 29.
    assert pipeline([work, work], [True] * 3, 2) == [15, 29]


def test_one_buffer_is_serial() -> None:
    work = StepWork((4, 4), (1, 2))
    assert pipeline([work, work], [True, True], 1) == [11, 22]


def test_units_that_stream_nothing_hide_reads() -> None:
    work = StepWork((0, 5, 0), (2, 3, 4))
    # read ends at 5, computes 2, 8, 12; the next read ends at 13 (buffer free at 8), computes 14, 17, 21.
    assert pipeline([work, work], [False, True, False], 1) == [12, 21]


def test_nothing_streams() -> None:
    assert pipeline([StepWork((0, 0), (1, 2))], [False, False], 0) == [3]


@given(st.data())
def test_pipeline_equals_walk(data: st.DataObject) -> None:
    streams = data.draw(st.lists(st.booleans(), min_size=1, max_size=7))
    depth = data.draw(st.integers(0, 4))
    num_steps = data.draw(st.integers(1, 4))
    batches = data.draw(st.integers(1, 3))
    seconds = st.integers(1, 9)
    units = make_units(streams)
    reads = [[data.draw(seconds) if s else 0 for s in streams] for _ in range(num_steps)]
    computes = [[[data.draw(seconds) for _ in range(batches)] for _ in streams] for _ in range(num_steps)]

    def cost(task: Task) -> float:
        if task.micro_batch is None:
            return reads[task.step][task.unit]
        return computes[task.step][task.unit][task.micro_batch]

    timeline = walk(block_tasks(units, num_steps, batches, depth), cost)
    work = [StepWork(tuple(reads[s]), tuple(sum(c) for c in computes[s])) for s in range(num_steps)]
    assert pipeline(work, streams, num_slots(units, depth)) == step_ends(timeline)
    busy = busy_seconds(timeline)
    assert busy["host_compute"] == sum(sum(map(sum, step)) for step in computes)
    assert busy.get("disk_read", 0) == sum(map(sum, reads))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=8), st.integers(0, 6), st.integers(1, 3))
def test_a_faster_task_never_lengthens_it(costs: list[tuple[int, int]], which: int, slots: int) -> None:
    streams = [read > 0 for read, _ in costs]
    if not any(streams):
        return
    work = StepWork(tuple(r for r, _ in costs), tuple(c for _, c in costs))
    place = which % len(costs)
    faster = StepWork(work.read_s, tuple(c * (0.5 if i == place else 1) for i, c in enumerate(work.compute_s)))
    assert pipeline([faster] * 3, streams, slots)[-1] <= pipeline([work] * 3, streams, slots)[-1]
    assert pipeline([work] * 3, streams, slots + 1)[-1] <= pipeline([work] * 3, streams, slots)[-1], "another buffer never harms"


def test_walk_times_follow_dependencies() -> None:
    units = make_units([True, False, True])
    timeline = walk(block_tasks(units, 2, 2, 1), lambda task: 1.0)
    ends = {timed.task.index: timed.end_s for timed in timeline}
    for timed in timeline:
        assert all(ends[index] <= timed.begin_s for index in timed.task.depends_on)
        assert timed.end_s - timed.begin_s == pytest.approx(1.0)
