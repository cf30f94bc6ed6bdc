"""Queues of the host: each a thread."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmoffload.executor.resources import Event, HandledEvent, QueuedTask, ServedQueue
from lmoffload.executor.turns import take_short_turns


@dataclass(eq=False)
class HostEvent(HandledEvent):
    """The end of a task of a thread; see `resources.Event`."""

    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def done(self) -> bool:
        return self.handled

    def wait(self) -> None:
        self.wait_handled()


class ThreadQueue(ServedQueue[HostEvent]):
    """A queue whose server is a thread.

    Args:
        cores: that it is bound to, if any.
        computes: whether its tasks do; those of others wait much and work briefly.
    """

    def __init__(self, name: str, cores: Sequence[int] = (), *, computes: bool = False) -> None:
        self._cores, self._computes = cores, computes
        super().__init__(name)

    def _new_event(self) -> HostEvent:
        return HostEvent()

    def _enter(self) -> None:
        torch.set_num_threads(1)  # of this thread: parallelism is the pools'
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        if not self._computes:
            take_short_turns()

    def _wait(self, before: Event) -> None:
        before.wait()

    def _perform(self, task: QueuedTask[HostEvent]) -> None:
        task.event.begin_s = time.perf_counter()
        task.run()
        task.event.end_s = time.perf_counter()

    def _settle(self) -> None:
        """A task has ended when its thread has done it."""
