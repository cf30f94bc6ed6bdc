"""`quality`: what each format costs a model, measured on a text through the kernels that runs use, and kept for later plans."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.api.importance import EXACT_KERNELS, LEAST_TOKENS, Windows, importance_of, plan_of_windows, windows_of
from lmoffload.api.losses import save_losses
from lmoffload.api.machine import Machine, machine_of
from lmoffload.api.model import Model, open_model
from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.checkpoint import Checkpoint, StoreProgress, open_store, remove_store, rounding_of, with_formats
from lmoffload.environment import prepare_threads
from lmoffload.errors import StatedError, UsageError
from lmoffload.report.progress import ProgressBar
from lmoffload_solver.formats import KV_FORMATS, QUANTIZED
from lmoffload_solver.loss import Activations, Loss, LossTable, MeasuredText, Part
from lmoffload_solver.plan import KernelsPlan, KVFormat, Named, Plan
from lmoffload_solver.variants import everything_in
from lmoffload_solver.workload import Limits

if TYPE_CHECKING:
    from lmoffload.executor import Score
    from lmoffload.jobs.sample import Sample

DEFAULT_TOKENS = 2048
"""Enough to rank formats; SmolLM2 takes about two minutes on two cores."""

KERNELS_OF: dict[Activations, KernelsPlan] = {"fp32": EXACT_KERNELS, "int8": KernelsPlan(prefill="int8_dot", decode="int8_dot")}
"""Kernels that stand for all that round activations so."""

KV_WINDOW, KV_DECODED = 256, 64
"""Keys and values lose where decode steps read what was kept: the last tokens of shorter windows are given one by one."""


def measure_losses(
    name: str | Path,
    *,
    text_file: Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    limits: Limits | None = None,
    machine: str | None = None,
    bar: ProgressBar | None = None,
    tell: Tell = tell_on_stderr,
) -> LossTable:
    """Measure what every format of weights, and of keys and values, costs a model, and keep the table in the user's data directory.

    Each format is put in a store of its own, one at a time; a store that was not there before is removed when it has been measured.

    Args:
        name: a folder in Hugging Face layout, a .gguf file, or a hub id.
        text_file: UTF-8 text to measure on, instead of the one that comes with lmoffload.
        tokens: how much of the text to take at most.
        limits: memory, threads and batches, as for a run.

    Raises:
        InfeasibleError: no plan exists within the limits.
        StatedError: the model or the text cannot be read, or the disk has no room for a store.
    """
    if tokens < LEAST_TOKENS:
        raise UsageError(f"The number given for tokens is {tokens}; it must be at least {LEAST_TOKENS}.")
    model = open_model(name)
    checkpoint = model.require_checkpoint()
    for remark in (*checkpoint.remarks, *prepare_threads()):
        tell(remark)
    on = machine_of(machine, checkpoint.path, on_progress=None if bar is None else bar.show_profiling, tell=tell)
    table = Measuring(model, on, limits or Limits(), _sample(text_file), tokens, bar, tell).table()
    save_losses(table)
    return table


class Measuring:
    """One measurement of a model's losses."""

    def __init__(
        self, model: Model, machine: Machine, limits: Limits, sample: Sample, tokens: int, bar: ProgressBar | None, tell: Tell
    ) -> None:
        from lmoffload.jobs.text import Text

        self.model, self.checkpoint, self.limits, self.tell = model, model.require_checkpoint(), limits, tell
        self.sample, self.tokens = sample, tokens
        self.text = Text(self.checkpoint)
        self.windows = windows_of(self.text, sample, model, tokens)
        self.machine = _with_every_format(machine)
        self.formats = [fmt for fmt in QUANTIZED if everything_in(model.shape, fmt) is not None]
        self.progress = _Progress(bar, 2 + len(KERNELS_OF) * len(self.formats) + len(KV_FORMATS))

    def table(self) -> LossTable:
        """Measure everything."""
        importance = importance_of(self.model, self.machine, self.limits, self.text, self.progress.running("calibrating"))
        self.progress.done += 1
        reference = self._scores(self.checkpoint, "fp32", "the model as it is stored")
        losses = [loss for fmt in self.formats for loss in self._losses_of(fmt, rounding_of(fmt, importance), reference)]
        return LossTable(
            model=Named(name=self.model.shape.name, digest=self.model.digest, place=self.model.place),
            text=_described(self.sample.name, self.windows),
            reference_perplexity=_perplexity(reference),
            losses=(*losses, *self._kv_losses()),
        )

    def _losses_of(self, fmt: str, rounding: str, reference: Sequence[Score]) -> Iterator[Loss]:
        with self._stored(fmt) as view:
            for activations in KERNELS_OF:
                scores = self._scores(view, activations, f"weights {fmt}, activations {activations}")
                yield _loss(Part("weights", fmt, activations), rounding, scores, reference)

    def _kv_losses(self) -> Iterator[Loss]:
        """Keys and values in each format, all weights exact, against fp32 keys and values on the same tokens."""
        windows = windows_of(self.text, self.sample, self.model, self.tokens, KV_WINDOW)
        windows = [window for window in windows if len(window) > KV_DECODED]
        if not windows:
            self.tell(f"Keys and values are not measured: that takes more than {KV_DECODED} tokens of text.")
            return
        plan = plan_of_windows(self.model, self.machine, self.limits, windows, EXACT_KERNELS, scored=True, num_decoded=KV_DECODED)
        if plan.kv.bytes.get("disk", 0):
            self.tell("Keys and values are not measured: within these limits they would lie on the disk.")
            return
        reference: list[Score] = []
        for fmt in KV_FORMATS:
            kept = plan.kv.model_copy(update={"format": KVFormat(key=fmt, value=fmt)})
            scores = self._run(self.checkpoint, plan.model_copy(update={"kv": kept, "quality": "any"}), windows, f"keys and values {fmt}")
            if fmt == "fp32":
                reference = scores
            else:
                yield _loss(Part("kv", fmt), None, scores, reference)

    @contextmanager
    def _stored(self, fmt: str) -> Iterator[Checkpoint]:
        """The model with everything in a format; stores that were not there before are gone afterwards."""
        kept = everything_in(self.model.shape, fmt)
        assert kept is not None
        formats = {t.name: t.format for t in kept.tensors if t.format in QUANTIZED}
        new = {name for name in set(formats.values()) if open_store(self.checkpoint, name, ()) is None}
        try:
            yield with_formats(self.checkpoint, formats, on_progress=self.progress.storing)
        finally:
            for name in new:
                remove_store(self.checkpoint, name)

    def _scores(self, view: Checkpoint, activations: Activations, what: str) -> list[Score]:
        kept = Model(view.shape, view, self.model.place)
        plan = plan_of_windows(kept, self.machine, self.limits, self.windows, KERNELS_OF[activations], scored=True)
        return self._run(view, plan, self.windows, what)

    def _run(self, view: Checkpoint, plan: Plan, windows: Windows, what: str) -> list[Score]:
        """Scores of the windows; where the plan decodes, of the tokens that are decoded."""
        from lmoffload import executor

        num_decoded = plan.workload.gen_len if plan.workload.gen_len > 1 else 0
        with executor.Engine(view, plan) as engine:
            scores = engine.score(windows, num_decoded, self.progress.running(what))
        self.progress.done += 1
        return [score.last(num_decoded) for score in scores] if num_decoded else scores


def _with_every_format(machine: Machine) -> Machine:
    """The machine with curves for formats that it has not measured: those of another, since a plan made to score needs no true times."""
    known = {curve.format for curve in machine.profile.linear}
    model = machine.profile.linear[0].format
    curves = [curve for curve in machine.profile.linear if curve.format == model]
    more = [curve.model_copy(update={"format": fmt}) for fmt in QUANTIZED if fmt not in known for curve in curves]
    return replace(machine, profile=machine.profile.model_copy(update={"linear": (*machine.profile.linear, *more)}))


class _Progress:
    """Shares of the whole measurement, every run counted alike."""

    def __init__(self, bar: ProgressBar | None, num_runs: int) -> None:
        self._bar, self._num_runs, self.done, self._began = bar, num_runs, 0, time.monotonic()

    def storing(self, progress: StoreProgress) -> None:
        self._show(f"rounding weights to {progress.format}, {progress.done_bytes / progress.total_bytes:.0%}", 0.0)

    def running(self, what: str) -> Callable[[float], None]:
        return lambda share: self._show(what, share)

    def _show(self, what: str, share: float) -> None:
        if self._bar is not None:
            whole, elapsed = (self.done + share) / self._num_runs, time.monotonic() - self._began
            self._bar.show(what, whole, elapsed * (1 - whole) / whole if whole else 0.0)


def _sample(file: Path | None) -> Sample:
    """The text to measure on."""
    from lmoffload.jobs.sample import Sample, measured_sample

    if file is None:
        return measured_sample()
    try:
        return Sample(file.name, file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StatedError(f"The text {file} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}.") from error


def _described(name: str, windows: Windows) -> MeasuredText:
    digest = hashlib.sha256(b"".join(token.to_bytes(4, "little") for window in windows for token in window)).hexdigest()
    return MeasuredText(name=name, digest=digest[:16], tokens=sum(len(window) - 1 for window in windows))


def _loss(part: Part, rounding: str | None, scores: Sequence[Score], reference: Sequence[Score]) -> Loss:
    perplexity, equal = _perplexity(scores), _equal_tokens(scores, reference)
    loss = perplexity / _perplexity(reference) - 1
    return Loss(**part._asdict(), rounding=rounding, perplexity=perplexity, loss=loss, equal_tokens=equal)


def _perplexity(scores: Sequence[Score]) -> float:
    total = sum(float(score.log_probabilities.double().sum()) for score in scores)
    return math.exp(-total / sum(len(score.log_probabilities) for score in scores))


def _equal_tokens(scores: Sequence[Score], reference: Sequence[Score]) -> float:
    equal = sum(int((one.likeliest == other.likeliest).sum()) for one, other in zip(scores, reference, strict=True))
    return equal / sum(len(score.likeliest) for score in reference)
