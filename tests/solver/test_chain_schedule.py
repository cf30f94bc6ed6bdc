"""The schedule with a device: one layout, two interpreters, and what must hold of its order."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload_solver.chain_layout import lay_out
from lmoffload_solver.chain_schedule import BatchWork, Clock, Graph, UnitWork, num_buffers
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.simulate import walk

SECONDS = st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0])
NAMES = ("read", "load_kv", "load_hidden", "quantize", "attend", "store_kv", "store_hidden", "write")


@st.composite
def works(draw: st.DrawFn) -> list[list[UnitWork]]:
    batches = draw(st.integers(1, 3))

    def batch() -> BatchWork:
        amounts = {name: draw(SECONDS) for name in NAMES}
        return BatchWork(compute=draw(st.integers(1, 4)), after=1.0 if amounts["attend"] else 0.0, **amounts)

    def unit(layer: int) -> UnitWork:
        return UnitWork(layer, draw(SECONDS), draw(SECONDS), draw(SECONDS), tuple(batch() for _ in range(batches)))

    steps, layers = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head = UnitWork(None, 0.0, 0.0, 0.0, (BatchWork(compute=1.0),) * batches)
    return [[*(unit(layer) for layer in range(layers)), head] for _ in range(steps)]


@given(works(), st.integers(0, 2), st.sampled_from(["queues", "barriers", "none"]))
@settings(max_examples=150, deadline=None)
def test_both_interpreters_agree(steps: list[list[UnitWork]], depth: int, overlap: str) -> None:
    runtime = Runtime.model_validate({"overlap": overlap})
    ends = lay_out(steps, runtime, depth, Clock().emit)
    graph = Graph()
    lay_out(steps, runtime, depth, graph.emit)
    timeline = walk(graph.tasks, lambda task: graph.seconds[task.index])
    last = max(timed.end_s for timed in timeline if timed.task.resource == "device")
    assert last <= max(timed.end_s for timed in timeline)
    assert ends[-1] == pytest.approx(max(t.end_s for t in timeline) if overlap != "queues" else last)
    assert all(later > earlier for earlier, later in pairwise(ends))
    for timed in timeline:
        assert all(timeline[index].end_s <= timed.begin_s for index in timed.task.depends_on)
        assert all(index < timed.task.index for index in timed.task.depends_on)


@given(works(), st.integers(0, 3), st.sampled_from(["queues", "barriers", "none"]), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_buffer_is_filled_when_it_has_been_emptied(steps: list[list[UnitWork]], depth: int, overlap: str, chance: Random) -> None:
    """However long tasks take: no use of a buffer of keys and values, or of weights, begins before the last use of it has ended; and keys
    and values are loaded after they were stored."""
    graph = Graph()
    lay_out(steps, Runtime.model_validate({"overlap": overlap}), depth, graph.emit)
    units, batches = len(steps[0]), len(steps[0][0].batches)
    attends = any(batch.attend for step in steps for unit in step for batch in unit.batches)
    buffers = {"queues": num_buffers(depth, attends), "barriers": 2, "none": 1}[overlap]
    kv: dict[int, list[tuple[float, float]]] = {}
    weights: dict[int, list[tuple[float, float]]] = {}
    stored: dict[tuple[int, int], float] = {}
    for timed in walk(graph.tasks, lambda task: chance.choice([0.0, 0.1, 1.0, 5.0])):
        task, span = timed.task, (timed.begin_s, timed.end_s)
        number = task.step * units + task.unit
        if task.micro_batch is None or task.kind in COMPUTES:
            weights.setdefault(number, []).append(span)
        if task.micro_batch is not None and task.kind in ("load_kv", "store_kv", *COMPUTES[:2]):
            kv.setdefault(number * batches + task.micro_batch, []).append(span)
            if task.kind == "load_kv":
                assert span[0] >= stored.get((task.unit, task.micro_batch), 0.0)
            elif task.kind == "store_kv":
                stored[task.unit, task.micro_batch] = span[1]
    for uses, turn in ((kv, 2), (weights, buffers)):
        for use, spans in uses.items():
            assert min(begin for begin, _ in spans) >= max((end for _, end in uses.get(use - turn, ())), default=0.0)


COMPUTES = ("compute", "compute_before_attention", "compute_after_attention")


@given(works(), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_queues_are_never_slower_than_taking_turns(steps: list[list[UnitWork]], depth: int) -> None:
    queues = lay_out(steps, Runtime(), depth, Clock().emit)[-1]
    turns = lay_out(steps, Runtime(overlap="none"), depth, Clock().emit)[-1]
    assert queues <= turns + 1e-9
    busy: dict[str, float] = {}
    graph = Graph()
    lay_out(steps, Runtime(), depth, graph.emit)
    for task, seconds in zip(graph.tasks, graph.seconds, strict=True):
        busy[task.resource] = busy.get(task.resource, 0.0) + seconds
    assert queues >= busy["device"] - 1e-9, "no resource does two things at once"


def test_weights_come_while_the_unit_before_computes() -> None:
    """Three layers of 4 s up and 3 s of computing: with one unit ahead 4 + 4 + 4 + 3 s, with none 3 · 7 s."""
    layer = UnitWork(0, 0.0, 4.0, 0.0, (BatchWork(compute=3.0),))
    assert lay_out([[layer] * 3], Runtime(), 1, Clock().emit) == [15.0]
    assert lay_out([[layer] * 3], Runtime(), 0, Clock().emit) == [21.0]
    assert lay_out([[layer] * 3], Runtime(overlap="none"), 1, Clock().emit) == [21.0]
    assert lay_out([[layer] * 3], Runtime(overlap="barriers"), 1, Clock().emit) == [4 + 4 + 4 + 3]


def test_the_host_attends_while_the_device_computes_others() -> None:
    """Two micro-batches, 2 s before and 1 s after attention, 3 s on the host: while the host attends to one, the device has the other."""
    layer = UnitWork(0, 0.0, 0.0, 0.0, (BatchWork(compute=2.0, attend=3.0, after=1.0),) * 2)
    head = UnitWork(None, 0.0, 0.0, 0.0, (BatchWork(compute=1.0),) * 2)
    # before 0-2, 2-4; host 2-5, 5-8; after and head 5-6-7, 8-9-10
    assert lay_out([[layer, head]], Runtime(), 1, Clock().emit) == [10.0]
    alone = [UnitWork(0, 0.0, 0.0, 0.0, layer.batches[:1]), UnitWork(None, 0.0, 0.0, 0.0, head.batches[:1])]
    assert lay_out([alone], Runtime(), 1, Clock().emit) == [7.0], "one micro-batch waits for the host"


def test_barriers_take_the_longest_of_each_turn() -> None:
    """FlexGen's loop: the next unit's weights go up in the first turn alone."""
    unit = UnitWork(0, 0.0, 6.0, 0.0, (BatchWork(compute=2.0), BatchWork(compute=2.0)))
    assert lay_out([[unit, unit]], Runtime(overlap="barriers"), 1, Clock().emit) == [6 + 6 + 2 + 2 + 2]
