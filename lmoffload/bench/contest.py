"""Peers on the same work: tokens compared first, then a short sweep of each one's settings, then interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lmoffload.bench.peer import Attempt, Conditions, Peer, attempt, prepare, with_check
from lmoffload.bench.work import Work
from lmoffload.units import format_number
from lmoffload_solver.comparison import Check, Row, Run, Settings, System

Tell = Callable[[str], None]

CHECK_PROMPTS, CHECK_TOKENS = 2, 8
TRIAL_TOKENS = 3
"""Of a run of a sweep: the prefill and two steps."""
PATIENCE, LEAST_PATIENCE_S = 4.0, 60.0
"""A trial is ended that takes so many times as long as the best one so far, and so long at least."""


@dataclass(slots=True)
class Contest:
    """How peers are compared."""

    work: Work
    conditions: Conditions
    rounds: int = 3
    cut: int | None = None
    """Tokens after which a run ends and the rest is projected; None: it does all."""
    check_projection: bool = False
    """Runs do all, and are told as `cut` tokens would have been projected."""
    sweep: bool = True
    reference: Peer | None = None
    """Whose greedy tokens are the right ones."""
    tell: Tell = field(default=lambda remark: None)
    wanted: tuple[tuple[int, ...], ...] = field(default=(), init=False)
    """The reference's tokens."""

    def run(self, peers: Sequence[Peer]) -> tuple[System, ...]:
        """Every peer's system, in the order given."""
        entries = [_Entry(peer, _system_of(peer)) for peer in peers]
        able = [entry for entry in entries if entry.system.status == "done"]
        self.wanted = self._reference_tokens() if able else ()
        for entry in able:
            self._prepare(entry.peer)
            if not self._is_ours(entry.peer):
                entry.check = self._checked(entry)
            self._swept(entry)
        for number in range(1, self.rounds + 1):
            for entry in able:
                for kind in entry.kinds:
                    self._once_more(entry, kind, number)
        return tuple(entry.told() for entry in entries)

    @property
    def _measured(self) -> Work:
        """What a run of a round does."""
        if self.cut is None or self.check_projection:
            return self.work
        return self.work.first(len(self.work.prompts), self.cut)

    def _reference_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Empty where there is no reference, or it fails."""
        if self.reference is None or self.reference.refusal is not None:
            return ()
        self.tell("Greedy tokens of the reference")
        found = attempt(self.reference, self._check_work, self.reference.default, self.conditions)
        return found.answer.token_ids if found.answer is not None and found.run.status == "done" else ()

    @property
    def _check_work(self) -> Work:
        return self.work.first(CHECK_PROMPTS, CHECK_TOKENS).model_copy(update={"repeats": 1})

    def _is_ours(self, peer: Peer) -> bool:
        """Of the reference's program the tokens of the first round are compared, which its plan has really made."""
        return self.reference is not None and peer.program == self.reference.program

    def _prepare(self, peer: Peer) -> None:
        """What a peer does once on a machine, without limits: compile parts of itself."""
        if peer.preparation is not None:
            self.tell(f"Preparing {peer.name}")
            prepare(peer, self.conditions)

    def _checked(self, entry: _Entry) -> Check:
        """The peer's greedy tokens of the first prompts beside the reference's, with its default settings."""
        peer = entry.peer
        self.tell(f"Greedy tokens of {peer.name}")
        found = attempt(peer, self._check_work, _for(peer.default, self._check_work), self.conditions)
        return self._judged(entry, found)

    def _judged(self, entry: _Entry, found: Attempt) -> Check:
        """Tokens beside the reference's, as far as both go."""
        if found.answer is None or not found.run.counts:
            return Check(status="failed", sentence=f"{found.run.status}: {found.run.sentence}")
        entry.about = found.answer.about
        tokens = tuple(row[:CHECK_TOKENS] for row in found.answer.token_ids[:CHECK_PROMPTS])
        wanted = tuple(right[: len(mine)] for mine, right in zip(tokens, self.wanted, strict=False))
        if not wanted:
            return Check(status="not compared", sentence="There are no reference tokens.", tokens=tokens)
        if not entry.peer.comparable:
            sentence = f"Weights in {entry.peer.weights}, which are not the checkpoint's own; {difference(tokens, wanted)}"
            return Check(status="not compared", sentence=sentence, tokens=tokens)
        return Check(status="equal" if tokens == wanted else "differs", sentence=difference(tokens, wanted), tokens=tokens)

    def _swept(self, entry: _Entry) -> None:
        """Try one setting after the other, each time keeping the best value found so far; failures are trials too."""
        peer = entry.peer
        if not (self.sweep and peer.axes):
            return
        best, best_rate = peer.default, self._trial(entry, peer.default, self.conditions)
        for name, values in peer.axes.items():
            start = best
            for value in values:
                if value != start.get(name):
                    settings = {**start, name: value}
                    rate = self._trial(entry, settings, self._patience(entry))
                    if rate > best_rate:
                        best, best_rate = settings, rate
        entry.best = best

    def _patience(self, entry: _Entry) -> Conditions:
        """The time limit of a trial."""
        quickest = max((run for run in entry.trials if run.counts), key=_rate, default=None)
        if quickest is None:
            return self.conditions
        limit = max(LEAST_PATIENCE_S, PATIENCE * quickest.wall_s)
        return replace(self.conditions, timeout_s=min(self.conditions.timeout_s, limit))

    def _trial(self, entry: _Entry, settings: Settings, conditions: Conditions) -> float:
        """Tokens per second of the whole work, projected from a short run of one batch; 0 where it fails."""
        size = settings.get("batch") or len(self.work.prompts)
        assert isinstance(size, int)
        short = self.work.first(size, TRIAL_TOKENS).model_copy(update={"repeats": self.work.repeats})
        found = self._attempt(entry, short, settings, f"{entry.peer.name}, trying {in_words(settings)}", conditions)
        entry.trials.append(found.run)
        if settings.get("dtype") == "float32" and entry.check is not None and entry.check.status == "differs" and found.run.counts:
            in_fp32 = self._judged(entry, found)  # precision agrees here
            entry.check = entry.check.model_copy(update={"sentence": f"{entry.check.sentence}; computed in fp32: {in_fp32.sentence}"})
        return _rate(found.run)

    def _once_more(self, entry: _Entry, kind: str, number: int) -> None:
        """One run of a row; a row that has failed is not run again."""
        runs = entry.runs.setdefault(kind, [])
        if any(not run.counts for run in runs):
            return
        settings = entry.peer.default if kind == "default" else entry.best
        found = self._attempt(entry, self._measured, settings, f"Round {number}: {entry.peer.name}, {kind}", self.conditions)
        run = found.run
        if entry.check is None:
            entry.check = self._judged(entry, found)
        if self.check_projection and self.cut is not None and run.status == "done":
            run = with_check(run, self.work, self.cut)
        runs.append(run)

    def _attempt(self, entry: _Entry, work: Work, settings: Settings, what: str, conditions: Conditions) -> Attempt:
        found = attempt(entry.peer, work, settings, conditions, self.work)
        figures = found.run.figures
        told = f"{found.run.status}: {found.run.sentence}" if figures is None else f"{figures.tokens_per_s:.2f} tokens/s"
        self.tell(f"{what}: {told}")
        if found.answer is not None and found.run.counts:
            entry.about = found.answer.about
        return found


class _Entry:
    """A peer and what is known of it so far."""

    def __init__(self, peer: Peer, system: System) -> None:
        self.peer, self.system = peer, system
        self.about = ""
        self.check: Check | None = None
        self.best = peer.default
        self.trials: list[Run] = []
        self.runs: dict[str, list[Run]] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Rows to run: the default and, where the sweep has found a better one, the best."""
        if not self.trials:
            return ("only",)
        return ("default",) if self.best == self.peer.default else ("default", "best")

    def told(self) -> System:
        rows = []
        for kind, runs in self.runs.items():
            settings = self.peer.default if kind == "default" else self.best
            rows.append(Row.model_validate({"kind": kind, "settings": settings, "runs": tuple(runs)}))
        known = {"about": self.about, "check": self.check, "trials": tuple(self.trials), "rows": tuple(rows)}
        return self.system.model_copy(update=known)


def _system_of(peer: Peer) -> System:
    """A peer that nothing is known of yet but whether it can run at all."""
    told = System(
        name=peer.name,
        weights=peer.weights,
        memory_bytes=peer.memory_bytes,
        command=f"{peer.python} {peer.program.name}",
    )
    if peer.refusal is not None:
        return told.model_copy(update={"status": "cannot run it", "sentence": peer.refusal})
    missing = peer.missing()
    return told if missing is None else told.model_copy(update={"status": "not installed", "sentence": missing})


def _rate(run: Run) -> float:
    return 0.0 if run.figures is None else run.figures.tokens_per_s


def _for(settings: Settings, work: Work) -> Settings:
    """The settings for work of fewer prompts."""
    return {**settings, "batch": len(work.prompts)} if settings.get("batch") else settings


def difference(got: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> str:
    """Where tokens first differ from the reference's, prompt by prompt, in words."""
    parts = []
    for number, (mine, right) in enumerate(zip(got, wanted, strict=False), 1):
        place = next((at for at, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b), None)
        if place is not None:
            parts.append(f"prompt {number} from token {place + 1} on ({mine[place]} instead of {right[place]})")
    if not parts:
        return f"all {format_number(sum(map(len, wanted)), 'token')} of {format_number(len(wanted), 'prompt')} equal"
    return "differs in " + ", ".join(parts)


def in_words(settings: Settings) -> str:
    """Settings in one line."""
    return ", ".join(f"{name} {'default' if value is None else value}" for name, value in settings.items()) or "no settings"
