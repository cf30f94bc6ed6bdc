"""What the programs of all systems share: the question and the answer, and the times of a job that is done in batches.

`python PROGRAM ASKED.json ANSWER.json`. Asked is an object with `model` (a path), `prompts` (token ids), `gen_len`, `repeats` (times
through the work; the last one counts), `settings`, `cores` (how many), `folder` (for files of its own), `started` (seconds since the
epoch) and what else the program needs. Only the standard library is imported here.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

SPAN_STEP = 2
"""The decode step whose spans are told, counted from 1; the first may still warm up."""


class Job:
    """What is asked, and the stamps of doing it once."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.settings = asked, asked["settings"]
        self.prompts: list[list[int]] = asked["prompts"]
        self.gen_len: int = asked["gen_len"]
        self.load_s = 0.0
        self.begin()

    def loaded(self) -> None:
        """From here on prompts can be taken."""
        self.load_s = time.time() - self.asked["started"]

    def begin(self) -> None:
        """Once more through the work: what was stamped before is forgotten."""
        self.start = self.last = time.perf_counter()
        self.prefill_s, self.step_s, self.first_token_s = 0.0, [0.0] * (self.gen_len - 1), 0.0
        self.at = 0
        self.spans: list[tuple[str, str, float, float]] = []

    def batches(self) -> Iterator[list[list[int]]]:
        """The prompts, `settings["batch"]` at a time."""
        size = self.settings.get("batch") or len(self.prompts)
        for first in range(0, len(self.prompts), size):
            self.at = 0
            yield self.prompts[first : first + size]

    def token(self) -> None:
        """Every row of the batch has one more token."""
        now = time.perf_counter()
        taken, self.last = now - self.last, now
        if self.at == 0:
            self.prefill_s += taken
            self.first_token_s = self.first_token_s or now - self.start
        elif self.at <= len(self.step_s):
            self.step_s[self.at - 1] += taken
        self.at += 1

    @property
    def watched(self) -> bool:
        """Whether this is the step, of the first batch, whose spans are told."""
        return self.at == min(SPAN_STEP, self.gen_len - 1) > 0

    def span(self, lane: str, name: str, begin: float, end: float) -> None:
        """Something done in the watched step; perf_counter's seconds."""
        self.spans.append((lane, name, begin, end))

    def answer(self, token_ids: list[list[int]], about: str) -> dict[str, Any]:
        zero = min((begin for _, _, begin, _ in self.spans), default=0.0)
        return {
            "token_ids": token_ids,
            "load_s": self.load_s,
            "prefill_s": self.prefill_s,
            "step_s": self.step_s,
            "first_token_s": self.first_token_s,
            "spans": [(lane, name, begin - zero, end - zero) for lane, name, begin, end in self.spans],
            "peak_rss_bytes": _peak_resident_bytes(),
            "bytes_read": _bytes_read(),
            "about": about,
        }


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """Do what is asked, and write the answer; what goes wrong is written too, in one line."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = Job(json.load(file))
    try:
        answer = run(job)
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)
    sys.exit("failed" in answer)


def _peak_resident_bytes() -> int:
    """As the kernel tells it; `getrusage` would tell the parent's where that was more."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next((1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM")), 0)


def _bytes_read() -> int:
    with open("/proc/self/io", encoding="ascii") as counts:
        return next((int(line.split()[1]) for line in counts if line.startswith("read_bytes")), 0)
