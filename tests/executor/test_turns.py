"""Threads that wait much and work briefly, and garbage that is not sought while an engine is open."""

import ctypes
import gc
import os
import threading

import pytest

from lmoffload.executor import Engine
from lmoffload.executor.turns import SHORT_TURN_NS, _Attributes, take_short_turns
from tests.executor.plans import make_plan

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def _attributes() -> _Attributes:
    """Of the calling thread, by the kernel."""
    found = _Attributes()
    number = SCHED_GETATTR[os.uname().machine]
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), ctypes.sizeof(found), 0) == 0
    return found


def test_short_turns_are_the_calling_threads_alone_and_change_nothing_else():
    if os.uname().machine not in SCHED_GETATTR:
        pytest.skip("no number of the system call known")
    told: list[tuple[bool, _Attributes, _Attributes]] = []

    def ask() -> None:
        before = _attributes()
        told.append((take_short_turns(), before, _attributes()))

    own = _attributes()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    ((granted, before, after),) = told
    assert (after.policy, after.nice) == (before.policy, before.nice)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release >= (6, 12):
        assert granted and after.runtime == SHORT_TURN_NS
    assert _attributes().runtime == own.runtime


def test_garbage_is_set_aside_while_an_engine_is_open(tiny):
    checkpoint = tiny("llama")
    with Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint)):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
