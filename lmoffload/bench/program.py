"""A program started, watched and ended: in its control groups, with its memory sampled while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lmoffload.bench.control_groups import ControlGroups

ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
"""A shell enters the groups and becomes the program, so that no Python of ours counts as the program's memory."""
FIRST_INTERVAL_S = 0.05
MOST_SAMPLES = 400


@dataclass(slots=True)
class Samples:
    """What the kernel said while the program ran. The interval doubles whenever there are many."""

    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, bytes): of the groups, or resident without any."""
    peak_rss_bytes: int = 0
    bytes_read: int = 0
    interval_s: float = FIRST_INTERVAL_S

    def take(self, seconds: float, process: Path, groups: ControlGroups | None) -> None:
        """One more sample; a process that has just ended says nothing."""
        status = _table(process / "status")
        self.peak_rss_bytes = max(self.peak_rss_bytes, 1024 * status.get("VmHWM", 0))
        self.bytes_read = max(self.bytes_read, _table(process / "io").get("read_bytes", 0))
        now = groups.memory_now() if groups is not None else 1024 * status.get("VmRSS", 0)
        if now:
            self.memory.append((seconds, now))
        if len(self.memory) > MOST_SAMPLES:
            del self.memory[1::2]
            self.interval_s *= 2


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended."""

    code: int
    """As `subprocess` tells it: minus the signal's number where one ended it."""
    wall_s: float
    timed_out: bool
    samples: Samples
    last_words: str
    """The last line that it wrote to standard error or output."""


def run_program(
    command: Sequence[str], environment: Mapping[str, str], groups: ControlGroups | None, log: Path, timeout_s: float
) -> Ended:
    """Run a program to its end, or to the time limit; what it has started ends with it.

    Args:
        log: file that takes all it writes.
    """
    entrances = () if groups is None else groups.entrances
    with log.open("wb") as output:
        begin = time.monotonic()
        child = subprocess.Popen(
            ["sh", "-c", ENTER, "sh", *map(str, entrances), "--", *command],
            env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        samples, process, timed_out = Samples(), Path("/proc") / str(child.pid), False
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(samples.interval_s)
                    break
                samples.take(time.monotonic() - begin, process, groups)
                if time.monotonic() - begin > timeout_s:
                    timed_out = True
                    break
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        return Ended(code, time.monotonic() - begin, timed_out, samples, _last_words(log))


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def _table(path: Path) -> dict[str, int]:
    """Lines "name: number ..." of a file; empty when the process has gone."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                found[name] = int(words[0])
    return found
