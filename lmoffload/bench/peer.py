"""A peer: a system with its program and settings; and one run of it, told as what it was."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmoffload.bench.control_groups import ControlGroups
from lmoffload.bench.page_cache import drop_page_cache
from lmoffload.bench.program import Ended, run_program
from lmoffload.bench.projection import decode_seconds
from lmoffload.bench.work import Answer, Work, figures_for, figures_of
from lmoffload.environment import environment_of_child
from lmoffload.units import format_bytes, format_number, format_seconds
from lmoffload_solver.comparison import Figures, Granted, Run, Setting, Settings, Status
from lmoffload_solver.errors import StatedError
from lmoffload_solver.value import parse_value

PASSIVE = "passive_wait"
"""The setting that makes OpenMP's threads sleep while they wait."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A system on a model."""

    name: str
    program: Path
    """See `children`."""
    python: Path
    model: Path
    weights: str
    """Format of its matrices."""
    package: str | None = None
    """What must be installed in its Python; None: nothing."""
    default: Settings = field(default_factory=dict)
    axes: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    """What a sweep tries of each setting, one after the other."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else its program is told."""
    environment: Mapping[str, str] = field(default_factory=dict)
    preparation: str | None = None
    """Python code that makes ready what its packages compile when they are first used."""
    comparable: bool = True
    """Whether its weights are the checkpoint's own, so that its greedy tokens should be the reference's."""
    memory_bytes: int | None = None
    """Its own limit instead of everybody's."""
    refusal: str | None = None
    """Why it cannot run this model or work at all."""

    def missing(self) -> str | None:
        """A sentence that says what is not installed, or None."""
        if self.package is None:
            return None
        ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.package!r}) is None)"
        try:
            code = subprocess.run([str(self.python), "-c", ask], capture_output=True, check=False).returncode
        except OSError as error:
            return f"The Python {self.python} cannot be started: {error.strerror}."
        return f"{self.package} is not installed in {self.python}." if code else None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What holds for every run."""

    granted: Granted
    scratch: Path
    """A folder on the disk that is limited, for offloaded weights."""
    timeout_s: float
    drop_cache: bool = True
    """The page cache is emptied before every run."""

    def for_peer(self, peer: Peer) -> Granted:
        """The limits, with its own memory where it was given another."""
        own = peer.memory_bytes
        return self.granted if own is None else self.granted.model_copy(update={"memory_bytes": own})


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run and what its program answered."""

    run: Run
    answer: Answer | None


def prepare(peer: Peer, conditions: Conditions) -> None:
    """Run a peer's preparation, without limits; whether it worked is seen in the runs that follow."""
    assert peer.preparation is not None
    with tempfile.TemporaryDirectory(prefix="lmoffload-compare-", dir=conditions.scratch) as folder:
        command = [str(peer.python), "-c", peer.preparation]
        run_program(command, environment_of_child(peer.environment), None, Path(folder) / "log", conditions.timeout_s)


def attempt(peer: Peer, work: Work, settings: Settings, conditions: Conditions, whole: Work | None = None) -> Attempt:
    """Run a peer once, in a process of its own, the page cache dropped before.

    Args:
        whole: the work that the figures are of, where `work` is its beginning (its first prompts, its first tokens): what is not done is
            projected.
    """
    with tempfile.TemporaryDirectory(prefix="lmoffload-compare-", dir=conditions.scratch) as name:
        folder = Path(name)
        asked = {
            **peer.facts,
            **work.model_dump(mode="json"),
            "model": str(peer.model),
            "settings": settings,
            "folder": name,
            "started": time.time(),
        }
        (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        command = [str(peer.python), str(peer.program), str(folder / "asked.json"), str(folder / "answer.json")]
        if conditions.drop_cache:
            drop_page_cache([peer.model])
        return _watched(peer, work, settings, conditions, command, folder, whole or work)


def _watched(
    peer: Peer, work: Work, settings: Settings, conditions: Conditions, command: list[str], folder: Path, whole: Work
) -> Attempt:
    granted = conditions.for_peer(peer)
    environment = environment_of_child({**peer.environment, **({"OMP_WAIT_POLICY": "PASSIVE"} if settings.get(PASSIVE) else {})})
    groups = ControlGroups.open(granted, {peer.model, folder}) if granted.enforced else None
    try:
        ended = run_program(command, environment, groups, folder / "log", conditions.timeout_s)
        kills, peak, read = (0, None, None) if groups is None else (groups.kills(), groups.memory_peak(), groups.bytes_read())
    finally:
        if groups is not None:
            groups.remove()
    answer, failure = _answer(folder / "answer.json", peer)
    failure = failure or ended.last_words or "no last words"
    run = Run(
        status="done",
        settings=settings,
        peak_memory_bytes=peak,
        peak_rss_bytes=max(ended.samples.peak_rss_bytes, 0 if answer is None else answer.peak_rss_bytes),
        bytes_read=max(ended.samples.bytes_read, 0 if answer is None else answer.bytes_read),
        disk_bytes_read=read,
        memory=tuple(ended.samples.memory),
        wall_s=ended.wall_s,
        spans=() if answer is None else answer.told_spans(),
    )
    fault = (
        _stopped(ended, answer, kills, granted)
        or (None if answer is not None and not ended.code else ("crashed", f"{_ending(ended.code)}: {failure}"))
        or _short(answer, work)
        or _too_large(run, granted)
    )
    if fault is not None:
        return Attempt(run.model_copy(update={"status": fault[0], "sentence": fault[1]}), answer)
    assert answer is not None
    figures = figures_of(answer, work) if work == whole else _projected(answer, work, whole)
    return Attempt(run.model_copy(update={"status": "done" if work == whole else "projected", "figures": figures}), answer)


Fault = tuple[Status, str]


def _answer(path: Path, peer: Peer) -> tuple[Answer | None, str | None]:
    """What the program wrote, or in one sentence why there is nothing."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None, None
    try:
        document = json.loads(text)
        if "failed" in document:
            return None, str(document["failed"])
        return parse_value(Answer, text, f"answer of {peer.name}"), None
    except (ValueError, TypeError, StatedError) as error:
        return None, str(error)


def _stopped(ended: Ended, answer: Answer | None, kills: int, granted: Granted) -> Fault | None:
    """Ended by the kernel for want of memory, or by us. The kernel's word comes first: what it has ended did not crash."""
    if kills and answer is None:
        allowed = "the machine has" if granted.memory_bytes is None else f"the limit of {format_bytes(granted.memory_bytes)} allows"
        return "over the memory limit", f"The kernel ended it: it needed more memory than {allowed}."
    if ended.timed_out:
        return "timed out", f"It was ended after {format_seconds(ended.wall_s)}."
    return None


def _short(answer: Answer | None, work: Work) -> Fault | None:
    if answer is None or answer.all_there(work):
        return None
    fewest = min((len(row) for row in answer.token_ids), default=0)
    asked = f"{format_number(len(work.prompts), 'prompt')} of {format_number(work.gen_len, 'token')} were asked for"
    return "too few tokens", f"It returned {format_number(len(answer.token_ids), 'prompt')} of {fewest} tokens at least; {asked}."


def _too_large(run: Run, granted: Granted) -> Fault | None:
    """Where nobody enforces the limit, it is held against what the process took."""
    limit, taken = granted.memory_bytes, run.peak_rss_bytes or 0
    if granted.enforced or limit is None or taken <= limit:
        return None
    return "over the memory limit", f"It took {format_bytes(taken)}, and the limit is {format_bytes(limit)}."


def _ending(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}" if code else "ended without an answer"


def _projected(answer: Answer, work: Work, whole: Work) -> Figures:
    return project(answer.prefill_s, answer.step_s, answer.load_s, answer.first_token_s, work, whole)


def project(
    prefill_s: float, step_s: tuple[float, ...], load_s: float, first_token_s: float, work: Work, whole: Work
) -> Figures:
    """Figures of `whole` from those of its first prompts and tokens: more prompts are more batches like the first."""
    batches = len(whole.prompts) / len(work.prompts)
    decode_s = decode_seconds(step_s, whole.gen_len - 1, work.prompt_tokens / len(work.prompts))
    return figures_for(whole, load_s, prefill_s * batches, decode_s * batches, first_token_s, step_s)


def with_check(run: Run, work: Work, cut: int) -> Run:
    """A whole run, told as its first `cut` tokens would have been projected, the measured figures beside."""
    full = run.figures
    if full is None:
        return run
    cut_work = work.first(len(work.prompts), cut)
    projected = project(full.prefill_s, full.step_s[: cut - 1], full.load_s, full.first_token_s, cut_work, work)
    return run.model_copy(update={"status": "projected", "figures": projected, "full": full})
