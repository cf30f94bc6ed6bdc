"""Progress of long work on standard error, with a predicted end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lmoffload.profiler.progress import Progress as Profiling
from lmoffload.units import format_remaining

if TYPE_CHECKING:
    from lmoffload.checkpoint import StoreProgress
    from lmoffload.executor import Progress as Step

BINDS = {"disk_read": "reading", "disk_write": "writing", "host_compute": "computing"}
"""What is told of a resource that has worked longest."""

LINE_EVERY_S = 15.0
"""Where standard error is no terminal, a line this often."""


class ProgressBar:
    """A bar on a terminal, now and then a line elsewhere. A context manager."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[end]}"), console=Console(stderr=True), transient=True
        )
        self._task = self._bar.add_task("", total=1.0, end="")
        self._next_line_s = time.monotonic() + LINE_EVERY_S

    def show(self, what: str, share: float, remaining_s: float, planned_s: float | None = None) -> None:
        """`share` of the work is done, and `remaining_s` seconds are left, where `planned_s` were planned for what is left."""
        left = f"{format_remaining(remaining_s)} left"
        if planned_s is not None:
            left += f" ({format_remaining(planned_s)} planned)"
        if sys.stderr.isatty():
            self._bar.update(self._task, description=what, completed=min(share, 1.0), end=left)
        elif time.monotonic() >= self._next_line_s:
            print(f"{what}: {share:.0%}, {left}", file=sys.stderr, flush=True)
            self._next_line_s = time.monotonic() + LINE_EVERY_S

    def say(self, what: str) -> None:
        """Something short without a known end has begun."""
        if sys.stderr.isatty():
            self._bar.update(self._task, description=what, completed=0.0, end="")

    def show_profiling(self, progress: Profiling) -> None:
        """The profiler has come to its next measurement."""
        whole_s = progress.elapsed_s + progress.remaining_s
        self.show(f"measuring: {progress.what}", progress.elapsed_s / whole_s if whole_s else 0.0, progress.remaining_s)

    def show_store(self) -> Callable[[StoreProgress], None]:
        """Shows how far the quantizing of weights is, and when it will end."""
        begin_s = time.monotonic()

        def show(progress: StoreProgress) -> None:
            share = progress.done_bytes / max(progress.total_bytes, 1)
            spent_s = time.monotonic() - begin_s
            self.show(f"quantizing weights to {progress.format}", share, spent_s * (1 - share) / share if share else 0.0)

        return show

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar.live.is_started:
            self._bar.stop()


class RunProgress:
    """Tells how far an engine is, how long it will still take (the plan's seconds, and corrected by those spent), how fast it is, and what
    binds."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar

    def show(self, step: Step) -> None:
        """A step has ended."""
        remaining_s = step.elapsed_s * (1 - step.share) / step.share if step.share else step.predicted_s
        rate = step.tokens_generated / step.elapsed_s if step.elapsed_s else 0.0
        what = f"{step.num_done} of {step.num_prompts} prompts, {rate:.1f} tokens/s, {BINDS.get(step.binds, step.binds)} binds"
        self._bar.show(what, step.share, remaining_s, (1 - step.share) * step.predicted_s)
