"""Several accelerators: splits, the schedule's order, and the search against plans drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from math import comb, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload_solver.chain_layout import lay_out
from lmoffload_solver.chain_plan import decision_of, plan_of
from lmoffload_solver.chain_predict import costs_of, simulate_chain
from lmoffload_solver.chain_rounding import spread_kv
from lmoffload_solver.chain_schedule import WHOLE, BatchWork, Clock, Graph, Share, UnitWork, handing_on
from lmoffload_solver.chain_search import ChainSearch
from lmoffload_solver.chain_terms import PLACES
from lmoffload_solver.decision import Decision, Job
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.pipeline import ALONE, MOST_SPLITS, Pipeline, Place, splits
from lmoffload_solver.runtime import Runtime
from lmoffload_solver.simulate import walk
from lmoffload_solver.value import Kind, Resource, Tier
from lmoffload_solver.workload import Limits
from tests.solver.device_toys import make_device_machine
from tests.solver.test_chain_schedule import COMPUTES, works
from tests.solver.toys import MIB, make_model, make_work


def with_devices(machine: MachineProfile, count: int) -> MachineProfile:
    assert machine.accelerator is not None
    return machine.model_copy(update={"accelerator": machine.accelerator.model_copy(update={"count": count})})


@pytest.mark.parametrize(("layers", "stages"), [(2, 2), (5, 2), (6, 3), (40, 2), (40, 3), (40, 5), (5, 5)])
def test_splits_give_every_layer_to_one_accelerator(layers: int, stages: int) -> None:
    found = list(splits(layers, stages))
    assert len(set(found)) == len(found) and all(sum(one) == layers and len(one) == stages and min(one) > 0 for one in found)
    assert max(found[0]) - min(found[0]) <= 1, "equal parts come first"
    if stages <= 3:
        assert len(found) == min(MOST_SPLITS, comb(layers - 1, stages - 1))
    assert list(splits(layers, 1)) == [()] and list(splits(1, 2)) == []


def test_two_accelerators_take_half_as_long_and_pass_hidden_states_on() -> None:
    """Two layers of 3 s and a head of 1 s, two micro-batches, three steps. One accelerator: 3 · (2·6 + 2) = 42 s. Two, two waves, hidden
    states 0.25 s each way: the second waits 3.5 s, then has 4 s of work for every micro-batch, and the first keeps ahead."""
    layers = [UnitWork(layer, 0.0, 0.0, 0.0, (BatchWork(compute=3.0),) * 2) for layer in (0, 1)]
    head = UnitWork(None, 0.0, 0.0, 0.0, (BatchWork(compute=1.0),) * 2)
    assert lay_out([[*layers, head]] * 3, Runtime(), 1, Clock().emit)[-1] == 42.0
    two = Pipeline((1, 1), 2)
    steps = [[*handing_on(layers, two, 0.25, 0.25), head]] * 3
    assert lay_out(steps, Runtime(), 1, Clock().emit, two) == [11.5, 19.5, 27.5]
    one_wave = lay_out(steps, Runtime(), 1, Clock().emit, replace(two, waves=1))
    # With one wave the second computes both heads last, from 9.5 s; the first goes on when the first token is chosen, at 10.5 s.
    assert one_wave == [11.5, 22.0, 32.5]


def test_weights_move_once_for_every_wave() -> None:
    unit = UnitWork(0, 0.0, 4.0, 0.0, (BatchWork(compute=1.0),) * 2)
    for waves in (1, 2):
        graph = Graph()
        lay_out([[unit, unit, unit]], Runtime(), 1, graph.emit, Pipeline((1, 1), waves))
        moved = sum(seconds for task, seconds in zip(graph.tasks, graph.seconds, strict=True) if task.resource == "upload")
        assert moved == pytest.approx(3 * 4.0 * waves)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[list[UnitWork]], Pipeline]:
    steps = draw(works())
    num_layers = len(steps[0]) - 1
    count = draw(st.integers(1, num_layers))
    cuts = sorted(draw(st.sets(st.integers(1, num_layers - 1), min_size=count - 1, max_size=count - 1))) if count > 1 else []
    layers = tuple(b - a for a, b in pairwise([0, *cuts, num_layers])) if count > 1 else ()
    pipeline = Pipeline(layers, draw(st.integers(1, count)))
    # What is read goes up.
    steps = [[replace(unit, upload=unit.upload or unit.read) for unit in step] for step in steps]
    return [[*handing_on(step[:-1], pipeline, 1.0, 1.0), step[-1]] for step in steps], pipeline


@given(pipelines(), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_every_buffer_of_every_stage_is_filled_when_it_has_been_emptied(
    drawn: tuple[list[list[UnitWork]], Pipeline], depth: int, chance: random.Random
) -> None:
    """However long tasks take: buffers of weights, and of keys and values, are filled when they are free; what was stored is loaded after
    it; hidden states are fetched by a stage after the one before stored them, and tokens are chosen before the next step begins."""
    steps, pipeline = drawn
    places: list[Place] = []
    graph = Graph()

    def emit(
        resource: Resource, kind: Kind, place: Place, seconds: float, after: tuple[float, ...], share: Share = WHOLE
    ) -> float:
        places.append(place)
        return graph.emit(resource, kind, place, seconds, after, share)

    ends = lay_out(steps, Runtime(), depth, emit, pipeline)
    assert len(ends) == len(steps) and list(ends) == sorted(ends)
    units, batches = len(steps[0]), len(steps[0][0].batches)
    attends = any(batch.attend for step in steps for unit in step for batch in unit.batches)
    kv: dict[tuple[int, int], list[tuple[float, float]]] = {}
    weights: dict[tuple[int, int], list[tuple[float, float]]] = {}
    stored: dict[tuple[int, int | None], float] = {}
    computed: dict[tuple[int, int, int | None], float] = {}
    first_of = {0, *accumulate(pipeline.layers[:-1])}
    for timed, place in zip(walk(graph.tasks, lambda task: chance.choice([0.0, 0.1, 1.0, 5.0])), places, strict=True):
        task, span = timed.task, (timed.begin_s, timed.end_s)
        assert place.stage == pipeline.stage_of(place.unit)
        if task.micro_batch is None or task.kind in COMPUTES:
            weights.setdefault((place.stage, pipeline.number(place, units, batches)), []).append(span)
        if task.micro_batch is not None and task.kind in ("load_kv", "store_kv", *COMPUTES[:2]):
            kv.setdefault((place.stage, pipeline.use(place, units, batches)), []).append(span)
        if task.kind == "load_kv":
            assert span[0] >= stored.get((task.unit, task.micro_batch), 0.0)
        elif task.kind == "store_kv":
            stored[task.unit, task.micro_batch] = span[1]
        if task.kind in COMPUTES[:2] and place.unit in first_of:
            before = (place.step, place.unit - 1) if place.unit else (place.step - 1, units - 1)
            assert span[0] >= computed.get((*before, task.micro_batch), 0.0)
        if task.kind in COMPUTES:
            computed[place.step, place.unit, task.micro_batch] = span[1]
    for uses, turn in ((kv, 2), (weights, depth + 1 + int(attends))):
        for (stage, use), spans in uses.items():
            assert min(begin for begin, _ in spans) >= max((end for _, end in uses.get((stage, use - turn), ())), default=0.0)


def random_decision(search: ChainSearch, chance: random.Random) -> Decision:
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    layers, count = search.model.num_layers, search.domain.num_devices
    size, batches = chance.choice(search.domain.pairs)
    on_device, on_disk = chance.random(), chance.choice([0.0, 0.0, 0.3])
    names = [t.name for t in search.model.tensors if t.is_matrix]
    homes = dict(zip(names, chance.choices(tiers, (on_device, 1 - on_device, on_disk), k=len(names)), strict=True))
    units = spread_kv(layers, batches, chance.choice([0, chance.randint(0, layers * batches)]), 0, 0)
    if chance.random() < 0.3:
        units = tuple(tuple(chance.choice(PLACES) for _ in range(batches)) for _ in range(layers))
    terms = search.domain.terms
    return Decision(
        micro_batch=size, num_micro_batches=batches, formats={}, homes=homes, kv_format=search.domain.base_format, kv=units,
        hidden=chance.choice(["device", "host"]), prefetch_depth=chance.choice([1, 2]), runtime=terms.costs.runtime,
        threads=terms.assignments[-1],
        pipeline=Pipeline(chance.choice(list(splits(layers, count))), chance.randint(1, min(count, batches))),
    )  # fmt: skip


@pytest.mark.parametrize(("seed", "count"), [(0, 2), (1, 2), (2, 3)])
def test_no_plan_drawn_at_random_is_quicker_than_the_search_or_its_bound(seed: int, count: int) -> None:
    chance = random.Random(seed)
    machine = with_devices(make_device_machine(int(chance.uniform(5, 9) * MIB), 32 * MIB, link=chance.choice([2e8, 1e9])), count)
    limits = Limits(micro_batch=2, num_micro_batches=4)
    job = Job(make_model(6, 256, 512, stored="bf16"), make_work(8, 64, 4))
    search = ChainSearch(job, machine, machine.disks[0], limits, "exact", inf)
    found = search.run()
    assert found is not None and search.memory.fits(found.decision)
    assert found.decision.pipeline.num_stages == count
    tried = 0
    for _ in range(300):
        decision = random_decision(search, chance)
        if search.memory.fits(decision):
            seconds = simulate_chain(job, costs_of(machine, decision), decision).total_s
            assert seconds >= search.bound_s * (1 - 1e-9)
            assert seconds >= found.simulated.total_s * (1 - 1e-9)
            tried += 1
    assert tried >= 20


def test_more_accelerators_are_quicker_and_one_is_the_special_case() -> None:
    model, work = make_model(6, 256, 512, stored="bf16"), make_work(8, 64, 4)
    job, seconds = Job(model, work), []
    for count in (1, 2, 3):
        machine = with_devices(make_device_machine(3 * MIB, 24 * MIB, link=2e8), count)
        found = ChainSearch(job, machine, machine.disks[0], Limits(micro_batch=1, num_micro_batches=8), "exact", inf).run()
        assert found is not None
        assert (found.decision.pipeline == ALONE) == (count == 1)
        plan = plan_of(job, machine, found.decision, digest=model.fingerprint(), simulated=found.simulated)
        assert decision_of(model, plan).pipeline == found.decision.pipeline
        seconds.append(found.simulated.total_s)
    assert seconds[0] > seconds[1] > seconds[2]
