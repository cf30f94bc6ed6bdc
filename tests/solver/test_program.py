"""The linear program: its optimum by hand, its duals, and its closed form."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmoffload_solver.closed_form import Head, Layers
from lmoffload_solver.costs import Contention
from lmoffload_solver.program import Choices, Program, ProgramStep, WeightClass

STEPS = (ProgramStep("0.0", 1.0, 30.0, 0.0, False, 1.0, 0.0), ProgramStep("0.1", 10.0, 2.0, 0.0, False, 0.1, 0.0))
NO_SIZES = np.zeros(0), np.zeros(0)
LAYERS, HEAD = Layers(10, 1000, 100, False, NO_SIZES, 10.0, 0.01, 0.01, 1.0), Head(200, 0.0, 0.0)


def make_choices(memory: int, *, depth: int = 1, contention: Contention | None = None, weights: int | None = None) -> Choices:
    """Ten layers of 60 + 40 bytes and a head of 200, read at 100 bytes/s."""
    of_layers = (WeightClass("attention", 400, 40.0, 4.0, 10), WeightClass("mlp", 600, 60.0, 6.0, 10))
    classes = (*of_layers, WeightClass("head", 200, 0.0, 2.0))
    return Choices(("host", "disk"), classes, STEPS, "layer", LAYERS, HEAD, depth, contention or Contention(), memory, weights)


def test_nothing_of_the_caller_stays() -> None:
    """What the first caller of the library held is free again when it has returned."""
    code = """
import gc, weakref
from lmoffload_solver.modelling import load_pulp
class Weights: pass
def call():
    held = Weights()
    load_pulp().LpProblem("a")
    return weakref.ref(held)
held = call()
gc.collect()
assert held() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_at_home() -> None:
    solution = Program(make_choices(1200)).solve()
    assert solution is not None
    assert solution.total_s == pytest.approx(30 + 10 * 2)
    assert solution.seconds_per_byte == 0


def test_streaming_by_hand() -> None:
    """Q bytes stream and 1200 − Q stay beside two buffers of (Q − 200)/10: with 600 bytes Q = 700 (the head and half of the layers)."""
    solution = Program(make_choices(600)).solve()
    assert solution is not None
    assert solution.read_s == pytest.approx(7.0)
    assert solution.buffer_bytes == pytest.approx(50.0)
    assert solution.total_s == pytest.approx(30 + 10 * 7)
    # One more byte lets 1/(1 − 2/10) = 1.25 bytes stay, each saving 10 steps · 1/100 s.
    assert solution.seconds_per_byte == pytest.approx(1.25 * 0.1)
    assert solution.waiting_s == pytest.approx(70), "ten steps of 7 s wait for the disk, the prefill does not"


def test_the_users_limit_binds_in_its_own_row() -> None:
    solution = Program(make_choices(1200, weights=600)).solve()
    assert solution is not None
    assert solution.total_s == pytest.approx(100)
    assert solution.duals["capacity.host"] == pytest.approx(0)
    assert solution.duals["capacity.weights"] == pytest.approx(-0.125)


def test_rows_are_named() -> None:
    rows = set(Program(make_choices(600, depth=0, contention=Contention(1.1, 1.2), weights=500)).rows)
    placed = {"placed.attention", "placed.mlp", "placed.head"}
    steps = {f"{family}.{step.name}" for family in ("read", "busy", "serial", "head", "pieces") for step in STEPS}
    assert rows == placed | steps | {"reader", "buffer", "capacity.host", "capacity.weights"}


def test_matrices_have_rows_of_their_own() -> None:
    program = Program(replace(make_choices(600), stream="matrix"))
    assert {"buffer.attention", "buffer.mlp"} <= set(program.rows)
    solution = program.solve()
    assert solution is not None
    # A buffer holds either class's unit, 40·a = 60·m: 1000 − 400·a − 600·m + 2·60·m = 600 with the head on disk, m = 0.37037.
    assert solution.buffer_bytes == pytest.approx(60 * 0.37037, abs=1e-3)
    assert solution.total_s == pytest.approx(30 + 10 * (2 + 12 * 0.37037), abs=1e-3)


def test_too_little_memory_is_infeasible() -> None:
    assert Program(make_choices(150)).solve() is None


def test_contention_by_hand() -> None:
    solution = Program(make_choices(600, contention=Contention(read=1.25, compute=1.5))).solve()
    assert solution is not None
    # Prefill: reading 7·1.25 s slows computing: 30 + 8.75/3. Decode: computing 2·1.5 s slows reading: 7 + 3/5.
    assert solution.total_s == pytest.approx(30 + 8.75 / 3 + 10 * 7.6)


def test_one_buffer_waits_for_computing() -> None:
    solution = Program(make_choices(600, depth=0)).solve()
    assert solution is not None
    # One buffer: 1200 − Q + (Q − 200)/10 = 600, Q = 644.4; at least 4.44 of the ten layers stream.
    assert solution.read_s == pytest.approx(6.444, abs=1e-3)
    assert solution.total_s == pytest.approx(30 + 10 * (6.4444 + 0.44444), abs=1e-2)


def test_a_head_at_home_is_computed_in_one_go() -> None:
    """While it is, no more is read than the ring holds. Q = 1200 − 800 + 2·S stream of the layers, S = Q/10: D = 5 s; the two buffers of 50
    bytes hold a second of them, so of the head's 7 s 6 are added."""
    classes = tuple(replace(c, read_s=1000.0) if c.name == "head" else c for c in make_choices(800).classes)
    steps = (ProgramStep("0.1", 10.0, 8.0, 0.0, False, 0.1, 7.0),)
    solution = Program(replace(make_choices(800), classes=classes, steps=steps)).solve()
    assert solution is not None
    assert solution.total_s == pytest.approx(10 * (5 + 7 - 1))


def test_a_head_that_streams_is_read_after_the_layers_but_for_the_ring() -> None:
    """The head's 2 s of reading, less a second that two buffers of 50 bytes hold, come after the 30 s of the prefill's layers."""
    solution = Program(replace(make_choices(600), head=Head(200, 2.0, 1.0))).solve()
    assert solution is not None
    assert solution.total_s == pytest.approx(31 + 10 * 7)


def test_whole_matrices_by_hand() -> None:
    """Ten matrices of 40 and ten of 60 bytes, and a head of 200."""
    assert Program(make_choices(1200), whole=True).bound_s() == pytest.approx(50)
    program, whole = Program(make_choices(600)).solve(), Program(make_choices(600), whole=True).bound_s()
    assert program is not None
    assert whole is not None
    # 600 bytes are not at home, and two buffers: of 40 bytes if all that streams is of 40, but 10·40 + 200 < 600 + 80. So of 60, and 720
    # bytes stream: the head, 8 of 60 and one of 40.
    assert whole == pytest.approx(30 + 10 * 7.2)
    assert program.total_s <= whole


def test_silent(capfd: pytest.CaptureFixture[str]) -> None:
    Program(make_choices(600)).solve()
    assert capfd.readouterr().out == ""


@settings(deadline=None, max_examples=40)
@given(st.integers(160, 1300), st.integers(0, 4), st.floats(1, 1.8), st.floats(1, 1.8))
def test_properties(memory: int, depth: int, read: float, compute: float) -> None:
    choices = make_choices(memory, depth=depth, contention=Contention(read, compute))
    solution = Program(choices).solve()
    more = Program(replace(choices, memory_bytes=memory + 50)).solve()
    if solution is None:
        return
    assert more is not None
    assert more.total_s <= solution.total_s + 1e-6, "more memory is never slower"
    for fractions in solution.fractions.values():
        assert sum(fractions.values()) == pytest.approx(1)
    assert solution.seconds_per_byte >= -1e-9
    saved = solution.total_s - more.total_s
    assert saved <= 50 * solution.seconds_per_byte + 1e-6, "the first byte saves most"
