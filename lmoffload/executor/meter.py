"""Measured times of a run: per task kind, per resource, per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from lmoffload_solver.chain_schedule import Server, busiest
from lmoffload_solver.costs import Phase
from lmoffload_solver.plan import Predicted
from lmoffload_solver.report import Waste
from lmoffload_solver.schedule import Task
from lmoffload_solver.value import Kind, Resource, Tier

if TYPE_CHECKING:
    from lmoffload.kernels.matrix import Matrix


@dataclass(frozen=True, slots=True)
class Span:
    """One task as it was run; seconds since the run began."""

    task: Task
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Sum:
    """Of things alike."""

    count: int = 0
    seconds: float = 0.0
    amount: int = 0

    def add(self, seconds: float, amount: int = 0) -> None:
        self.count += 1
        self.seconds += seconds
        self.amount += amount


class Attended(NamedTuple):
    """Sequences that were attended to."""

    calls: int = 0
    sequences: int = 0
    tokens: int = 0
    squares: int = 0
    """Of their lengths, those of the tokens attended to before taken off; summed."""
    seconds: float = 0.0

    def with_more(self, more: Attended) -> Attended:
        """Both together."""
        return Attended(
            self.calls + more.calls,
            self.sequences + more.sequences,
            self.tokens + more.tokens,
            self.squares + more.squares,
            self.seconds + more.seconds,
        )


class Forwards(NamedTuple):
    """Forwards of micro-batches, one for each and step, or for each chunk."""

    number: int = 0
    tokens: int = 0
    rows: int = 0


def merged(meters: Sequence[Meter]) -> Meter:
    """The first meter with the products and attention that all were told of."""
    first, *others = meters
    if not others:
        return first
    products, attentions = {key: replace(seen) for key, seen in first.products.items()}, dict(first.attentions)
    for other in others:
        for key, seen in list(other.products.items()):
            total = products.setdefault(key, Sum())
            products[key] = Sum(total.count + seen.count, total.seconds + seen.seconds, total.amount + seen.amount)
        for place, attended in list(other.attentions.items()):
            attentions[place] = attentions.get(place, Attended()).with_more(attended)
    return replace(first, products=products, attentions=attentions)


def about(count: int) -> int:
    """A number of at most five binary digits, then zeros, that is at most 1/16 smaller: what is alike enough to be added up."""
    zeros = max(0, count.bit_length() - 5)
    return count >> zeros << zeros


@dataclass(slots=True)
class Meter:
    """Adds up what tasks and steps took."""

    keep_spans: bool = False
    """From now on."""
    spans: list[Span] = field(default_factory=list)
    counts: dict[Kind, int] = field(default_factory=dict)
    seconds: dict[Kind, float] = field(default_factory=dict)
    busy: dict[Server, float] = field(default_factory=dict)
    pairs: set[tuple[Kind, Resource]] = field(default_factory=set)
    """Kinds of tasks with the resources that they ran on."""
    overlapped_s: float = 0.0
    """In which at least two resources worked."""
    control_s: float = 0.0
    """Of the thread that hands tasks over, working."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_full_steps: int = 0
    """Decode steps of blocks as large as the first, with all their rows, and their time: what `step_s` is about."""
    full_steps_s: float = 0.0
    tokens: int = 0
    decode_tokens: int = 0
    """Tokens but each row's first, which the prefill gives."""
    prompts: int = 0
    padding_tokens: int = 0
    """Computed and nobody's."""
    places: int = 0
    """Of blocks, in every step; `tokens` of them were taken by a row that computed."""
    room_tokens: int = 0
    """Of keys and values, in every step."""
    held_tokens: int = 0
    """Of them those with keys and values of a row that computed."""
    spilled_bytes: int = 0
    """Of a block's keys and values on the disk, at most."""
    phase: Phase = "prefill"
    """Of what computes now."""
    reads: dict[tuple[Phase, int], Sum] = field(default_factory=dict)
    """By phase and unit."""
    compute_s: dict[Phase, float] = field(default_factory=dict)
    products: dict[tuple[Phase, str, str, int, int, int], Sum] = field(default_factory=dict)
    """By phase, kernel, format, N, K and about how many rows; the amount is rows."""
    attentions: dict[tuple[Phase, int, int], Attended] = field(default_factory=dict)
    """By phase, layer and about how long the sequences are."""
    forwards: dict[Phase, Forwards] = field(default_factory=dict)
    _spans: Sequence[tuple[int, int]] = ()
    _attended: Attended = field(default_factory=Attended)

    def task(self, task: Task, begin_s: float, end_s: float) -> None:
        """Count a task that took from `begin_s` to `end_s`."""
        self.counts[task.kind] = self.counts.get(task.kind, 0) + 1
        self.seconds[task.kind] = self.seconds.get(task.kind, 0.0) + end_s - begin_s
        server = task.resource, task.stage
        self.busy[server] = self.busy.get(server, 0.0) + end_s - begin_s
        self.pairs.add((task.kind, task.resource))
        if task.kind == "read_weights":
            self.reads.setdefault(("decode" if task.step else "prefill", task.unit), Sum()).add(end_s - begin_s)
        if self.keep_spans:
            self.spans.append(Span(task, begin_s, end_s))

    def together(self, spans: Sequence[tuple[float, float]]) -> None:
        """Count the time in which at least two of these tasks, of resources that do one at a time, ran: (begin_s, end_s) of each."""
        edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
        running, since = 0, 0.0
        for at, change in edges:
            if running >= 2:
                self.overlapped_s += at - since
            running, since = running + change, at

    def resource_of(self, kind: Kind) -> Resource | None:
        """The resource that did this kind of tasks and nothing else; None where there is none."""
        (resource, *more) = [resource for other, resource in self.pairs if other == kind]
        alone = not more and all(other == kind for other, used in self.pairs if used == resource)
        return resource if alone else None

    def computed(self, phase: Phase, seconds: float) -> None:
        """Count what of a compute task fell to forwards of a phase: prompts may join while others decode."""
        self.compute_s[phase] = self.compute_s.get(phase, 0.0) + seconds

    def product(self, kernel: str, matrix: Matrix, rows: int, seconds: float) -> None:
        """Count a product with a matrix; see `modeling.runtime.Watch`."""
        key = (self.phase, kernel, matrix.format, matrix.n, matrix.k, about(rows))
        self.products.setdefault(key, Sum()).add(seconds, rows)

    def attention(self, layer: int, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Count attention at a layer; see `modeling.runtime.Watch`."""
        if spans is not self._spans:
            squares = sum(length * length - known * known for known, length in spans)
            self._spans, self._attended = spans, Attended(1, len(spans), sum(length for _, length in spans), squares)
        key = (self.phase, layer, about(self._attended.tokens // self._attended.sequences))
        self.attentions[key] = self.attentions.get(key, Attended()).with_more(self._attended._replace(seconds=seconds))

    def forward(self, phase: Phase, tokens: int, rows: int) -> None:
        """Count the beginning of a forward of a micro-batch over so many tokens, padding included, and the rows that end in it."""
        seen = self.forwards.get(phase, Forwards())
        self.forwards[phase] = Forwards(seen.number + 1, seen.tokens + tokens, seen.rows + rows)

    def step(self, step: int, seconds: float, full: bool) -> None:
        """Count a step of a block; `full` when every micro-batch of a full block computed in it."""
        if step == 0:
            self.prefill_s += seconds
            return
        self.decode_s += seconds
        if full:
            self.num_full_steps += 1
            self.full_steps_s += seconds

    @property
    def waste(self) -> Waste | None:
        """None where nothing was computed."""
        computed = sum(seen.tokens for seen in self.forwards.values())
        if not (computed and self.places and self.room_tokens):
            return None
        return Waste(
            padding=self.padding_tokens / computed,
            idle_places=1 - self.tokens / self.places,
            unused_kv=1 - self.held_tokens / self.room_tokens,
        )

    def figures(self, peak_bytes: dict[Tier, int], base_bytes: int) -> Predicted:
        """The same quantities as a prediction, measured."""
        total = self.prefill_s + self.decode_s
        return Predicted(
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            total_s=total,
            tokens_per_s=self.tokens / total if total else 0.0,
            decode_tokens_per_s=self.decode_tokens / self.decode_s if self.decode_s else 0.0,
            step_s=self.full_steps_s / self.num_full_steps if self.num_full_steps else 0.0,
            resources=busiest(self.busy),
            peak_bytes=peak_bytes,
            base_bytes=base_bytes,
        )
