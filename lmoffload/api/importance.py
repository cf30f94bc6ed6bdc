"""What the columns of a model's matrices count: measured on a text that comes with lmoffload, and kept beside the stores."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmoffload.api.machine import Machine
from lmoffload.api.model import Model
from lmoffload.api.planning import ModelPlan, solve_for
from lmoffload.api.telling import Tell
from lmoffload.checkpoint import Importance, needs_importance, open_store, read_importance, write_importance
from lmoffload.errors import InfeasibleError, StatedError
from lmoffload.profiler.apart import HANGS_S, ask_child
from lmoffload_solver.emulated import bare
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.plan import KernelsPlan, Plan, kept_model
from lmoffload_solver.workload import Limits, Workload

if TYPE_CHECKING:
    from lmoffload.jobs.sample import Sample
    from lmoffload.jobs.text import Text

WINDOW = 512
"""Tokens of a piece of text that the model sees at once."""

LEAST_TOKENS = 64

CALIBRATION_TOKENS = 1024
"""A mean square needs few: SmolLM2's int4 (groups of 64) loses 7.5 % with 1,024 tokens and 7.8 % with 4,096."""

EXACT_KERNELS = KernelsPlan(prefill="widen_tiles", decode="fused_dot")
"""Kernels that round no activations and take every format."""

Windows = Sequence[Sequence[int]]


def windows_of(text: Text, sample: Sample, model: Model, tokens: int, window: int = WINDOW) -> Windows:
    """The first pieces of a sample, of `window` tokens or as many as the model has positions for, about `tokens` together.

    Raises:
        StatedError: it is too short.
    """
    length = min(window, (model.shape.max_positions or window + 1) - 1)
    windows = text.windows(sample.text, length, tokens)
    if sum(map(len, windows)) < LEAST_TOKENS:
        raise StatedError(f"The text {sample.name} has fewer than {LEAST_TOKENS} tokens: give a longer one.")
    return windows


def plan_of_windows(
    model: Model, machine: Machine, limits: Limits, windows: Windows, kernels: KernelsPlan, *, scored: bool, num_decoded: int = 1
) -> Plan:
    """A plan to compute windows within the limits by given linear kernels, however fast others are.

    Raises:
        InfeasibleError: none exists.
    """
    workload = Workload.of_lengths([len(window) for window in windows], num_decoded).model_copy(update={"scored": scored})
    return solve_for(model, machine, workload, limits).plan.model_copy(update={"kernels": kernels})


def require_importance(planned: ModelPlan, text: Text, tell: Tell) -> None:
    """Measure what a model's columns count before its weights are first rounded to 4 bits, where a plan wants that; within its limits."""
    model, shape = planned.model, planned.model.shape
    narrow = {t.name: t.format for t in kept_model(shape, planned.plan).tensors if needs_importance(t.format)}
    stored = all(
        open_store(model.require_checkpoint(), fmt, [name for name, other in narrow.items() if other == fmt]) is not None
        for fmt in set(narrow.values())
    )
    if stored or read_importance(model.digest) is not None:
        return
    from lmoffload.jobs.sample import calibration_sample

    tell("Weights are rounded to 4 bits for the first time: measuring what their columns count.")
    machine, limits = bare(planned.machine, planned.plan.limits)
    windows = windows_of(text, calibration_sample(), model, CALIBRATION_TOKENS)
    try:
        _measure_apart(model, machine, limits, windows)
    except InfeasibleError as error:
        tell(f"They are rounded to the nearest instead, which loses more, because the model as it is stored cannot be run: {error}")


def _measure_apart(model: Model, machine: MachineProfile, limits: Limits, windows: Windows) -> None:
    """Measure in a process of its own, whose heap does not stay with this one's run; in this one where both do not fit.

    Raises:
        InfeasibleError: no plan exists within the limits.
        StatedError: something cannot be read or written.
    """
    from lmoffload.executor.process import resident_bytes

    most = machine.host.memory_usable_bytes if limits.host_memory_bytes is None else limits.host_memory_bytes
    beside = limits.model_copy(update={"host_memory_bytes": max(1, most - resident_bytes())})
    documents = {"machine": machine.model_dump_json(), "limits": beside.model_dump_json()}
    arguments = {"model": model.place, "windows": [list(window) for window in windows], **documents}
    if not ask_child("importance", HANGS_S, arguments, module="lmoffload.api.child")["measured"]:
        measure_importance(model, Machine(machine, is_here=True), limits, windows)
        gc.collect()  # an engine's parts name each other, and its weights are not to lie beside the run's


def importance_of(
    model: Model, machine: Machine, limits: Limits, text: Text, on_progress: Callable[[float], None] = lambda share: None
) -> Importance:
    """What the model's columns count: as kept, or measured now, with the weights as they are stored, and kept.

    Raises:
        InfeasibleError: no plan exists within the limits.
        StatedError: something cannot be read or written.
    """
    found = read_importance(model.digest)
    if found is not None:
        return found
    from lmoffload.jobs.sample import calibration_sample

    windows = windows_of(text, calibration_sample(), model, CALIBRATION_TOKENS)
    return measure_importance(model, machine, limits, windows, on_progress)


def measure_importance(
    model: Model, machine: Machine, limits: Limits, windows: Windows, on_progress: Callable[[float], None] = lambda share: None
) -> Importance:
    """The same, measured now over the first windows of the calibration text."""
    from lmoffload import executor
    from lmoffload.jobs.sample import calibration_sample

    checkpoint = model.require_checkpoint()
    plan = plan_of_windows(model, machine, limits, windows, EXACT_KERNELS, scored=False)
    with executor.Engine(checkpoint, plan) as engine:
        squares = engine.input_squares(windows, on_progress)
    found = Importance({name: square.numpy() for name, square in squares.items()}, calibration_sample().name)
    write_importance(found, checkpoint.fingerprint)
    return found
