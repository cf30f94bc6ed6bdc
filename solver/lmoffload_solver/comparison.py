"""Comparison: systems measured on the same work under the same limits. Field names are the contract of `compare --json`."""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import Field

from lmoffload_solver.machine import HostLimits
from lmoffload_solver.plan import Named
from lmoffload_solver.value import Quality, Value
from lmoffload_solver.workload import Workload

Status = Literal[
    "done",
    "projected",
    "not installed",
    "cannot run it",
    "crashed",
    "too few tokens",
    "over the memory limit",
    "timed out",
]
"""What came of a run. "projected": it did the first tokens, and the rest of the time is computed from them."""

Setting = str | int | float | bool | None
Settings = dict[str, Setting]
"""What a system's user may choose, by name."""


class Granted(Value):
    """What every system gets; None: as much as the machine has."""

    memory_bytes: int | None = Field(default=None, gt=0)
    """Page cache included."""
    read_bytes_per_s: int | None = Field(default=None, gt=0)
    cores: tuple[int, ...] = ()
    """Numbers of the processors; empty: all."""
    enforced: bool = True
    """By the kernel. False where control groups cannot be made here: then nothing is limited."""


class Span(Value):
    """Something that a system did in a decode step; seconds from the step's begin."""

    lane: str
    """What did it: a resource, a thread, the whole program."""
    name: str
    begin_s: float
    end_s: float


class Figures(Value):
    """One time through the work."""

    load_s: float
    """From the process's begin until it could take prompts; not part of the other times."""
    prefill_s: float
    decode_s: float
    """Of the gen_len − 1 steps after the prefill."""
    first_token_s: float
    """From the work's begin to the first token of the first batch."""
    step_s: tuple[float, ...]
    """Measured steps; each is summed over the batches."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of prompts × (gen_len − 1) tokens; 0 without decode steps."""
    tokens_per_s: float
    """Generated tokens / (prefill + decode)."""

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


class Run(Value):
    """One process of one system with one choice of settings."""

    status: Status
    sentence: str | None = None
    """What went wrong, in the system's own last words where it has some."""
    settings: Settings = Field(default_factory=dict)
    figures: Figures | None = None
    full: Figures | None = None
    """As measured to the end, where a projection was checked against it."""
    peak_memory_bytes: int | None = None
    """Of the control group, page cache included, as the kernel tells; None without one."""
    peak_rss_bytes: int | None = None
    """Of the process."""
    bytes_read: int | None = None
    """From disk, by the process (/proc/self/io)."""
    disk_bytes_read: int | None = None
    """From the disk, by the control group; None without one."""
    memory: tuple[tuple[float, int], ...] = ()
    """(seconds since the process began, bytes): of the control group, or resident without one."""
    wall_s: float = 0.0
    """Of the process, from its begin to its end."""
    spans: tuple[Span, ...] = ()
    """Of one decode step."""

    @property
    def counts(self) -> bool:
        """Whether its figures are of the whole work."""
        return self.status in ("done", "projected") and self.figures is not None

    @property
    def projection_error(self) -> float | None:
        """projected / measured − 1 of the whole time, where both are there."""
        return None if self.figures is None or self.full is None else self.figures.total_s / self.full.total_s - 1


class Row(Value):
    """One choice of settings, run once a round."""

    kind: Literal["default", "best", "only"]
    settings: Settings
    runs: tuple[Run, ...]

    @property
    def counted(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.counts)

    @property
    def middle(self) -> Run | None:
        """The run of median throughput (of an even number, the slower of the two in the middle); None where none counts."""
        ordered = sorted(self.counted, key=lambda run: run.figures.tokens_per_s if run.figures else 0.0)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def median(self, field: str) -> float | None:
        """Of a figure over the rounds."""
        values = [getattr(run.figures, field) for run in self.counted]
        return statistics.median(values) if values else None

    def spread(self, field: str) -> tuple[float, float] | None:
        """The least and the largest of a figure over the rounds."""
        values = [getattr(run.figures, field) for run in self.counted]
        return (min(values), max(values)) if values else None


class Check(Value):
    """Greedy tokens of a few prompts beside the reference's."""

    status: Literal["equal", "differs", "not compared", "failed"]
    sentence: str
    tokens: tuple[tuple[int, ...], ...] = ()


class System(Value):
    """One system in the comparison."""

    name: str
    about: str = ""
    """Its versions, and what it runs on."""
    weights: str
    """Format of its matrices."""
    memory_bytes: int | None = None
    """Its own limit, where it was given another than the rest."""
    check: Check | None = None
    trials: tuple[Run, ...] = ()
    """The sweep, in the order tried: short runs whose figures are projected to the whole work."""
    rows: tuple[Row, ...] = ()
    status: Status = "done"
    sentence: str | None = None
    """Why there are no rows."""
    command: str = ""
    """The program, as it was started."""

    @property
    def best(self) -> Row | None:
        """The row of the highest median throughput; None where no run counts."""
        counted = [row for row in self.rows if row.counted]
        return max(counted, key=lambda row: row.median("tokens_per_s") or 0.0, default=None)


class Comparison(Value):
    """Several systems on the same work."""

    schema_version: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    model: Named
    model_bytes: int
    kv_bytes: int
    """Of the whole work's keys and values in 16 bits, as FlexGen counts its cache."""
    hidden_bytes: int
    """Of one layer's hidden states of the whole work in 16 bits."""
    machine: str
    host: HostLimits
    processor: str
    versions: dict[str, str]
    made_at: str
    command: tuple[str, ...]
    """Repeats it."""
    workload: Workload
    quality: Quality
    granted: Granted
    emulated_device: str | None = None
    rounds: int
    warm: bool = False
    """Every process did the work twice, and the second time counts."""
    cold: bool = True
    """The page cache was emptied before every run."""
    measured_tokens: int
    """Of gen_len: how many each prompt was really continued by."""
    systems: tuple[System, ...]
    remarks: tuple[str, ...] = ()

    model_config = Value.model_config | {"populate_by_name": True, "serialize_by_alias": True}
