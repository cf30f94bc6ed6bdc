"""An explanation, readable: where time and memory go, what binds, what other choices would give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType

from lmoffload.report.tables import facts, grid
from lmoffload.units import format_bytes, format_seconds, format_share
from lmoffload_solver.explain import Alternative, CoreChoice, Explanation
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import Resource

_PARTS = {
    "base": "the process itself",
    "objects": "modules and tokenizer",
    "vectors": "norms and biases",
    "kv": "keys and values",
    "tiles": "scratch of the kernels",
    "weights": "matrices kept in memory",
    "ring": "buffers that disk reads fill",
    "suspended": "micro-batches between layers",
    "transient": "activations of one layer or the head",
}
"""What docs/model.md calls the parts of the memory, in words."""


def explain_tables(plan: Plan, explanation: Explanation) -> Iterator[RenderableType]:
    """Time, bounds, memory, alternatives."""
    yield f"[italic]Plan for {plan.model.name} on {plan.machine.name}[/italic]"
    yield grid("Time of the first block", ("phase", "in all", "busy", "binds", "it waits"), _phases(explanation))
    yield facts("How near to the best", _bounds(explanation))
    yield grid("Memory at the peak", ("part", "bytes"), _memory(explanation))
    if explanation.quantization:
        yield grid("What quantization saves and costs", ("of", "phase", "saved", "spent"), _quantization(explanation))
    yield facts("Cores of the host", _cores(explanation.cores))
    yield grid("Other choices", ("change", "tokens/s", "against the plan", "peak"), _alternatives(explanation))


def _phases(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    for name, phase in (("prefill", explanation.prefill), ("decode", explanation.decode)):
        busy = ", ".join(f"{resource} {format_seconds(seconds)}" for resource, seconds in phase.busy_s.items())
        yield name, format_seconds(phase.seconds), busy, phase.binding, format_seconds(phase.idle_s)


def _bounds(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "predicted", f"{explanation.predicted_tokens_per_s:.2f} tokens/s"
    if explanation.program_tokens_per_s is not None:
        yield "these choices, fractions of tensors and perfect overlap", f"{explanation.program_tokens_per_s:.2f} tokens/s"
    yield "no plan exceeds", f"{explanation.bound_tokens_per_s:.2f} tokens/s (gap {explanation.gap:.1%})"
    what = "moved to the device each step" if "device" in explanation.weights_bytes else "read from disk each step"
    yield what, format_bytes(explanation.moved_bytes_per_step)


def _quantization(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    for term in explanation.quantization:
        yield f"{term.what} in {term.format}", term.phase, _seconds(term.saved_s), _seconds(term.spent_s)


def _seconds(by_resource: Mapping[Resource, float]) -> str:
    return ", ".join(f"{resource} {format_seconds(seconds)}" for resource, seconds in by_resource.items()) or "nothing"


def _cores(choice: CoreChoice) -> Iterator[tuple[str, str]]:
    yield "operators at once", f"{choice.widest_level} ({choice.levels} levels of the host's attention)"
    shared = ", ".join(f"{count} {name}" for name, count in choice.best.totals().items())
    yield f"of {choice.cores} cores", f"{shared}; the slowest class takes {format_seconds(choice.best.slowest_s)}"
    yield "by the libraries' default", f"all cores for every class: {format_seconds(choice.default.slowest_s)}"


def _memory(explanation: Explanation) -> Iterator[tuple[str, str]]:
    for part, size in explanation.memory_parts.items():
        yield f"{part}: {_PARTS[part]}" if part in _PARTS else part, format_bytes(size)
    yield "in all", format_bytes(sum(explanation.memory_parts.values()))
    yield "usable", format_bytes(explanation.memory_usable_bytes)


def _alternatives(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    for other in explanation.alternatives:
        yield (other.change, *_figures(other, explanation.predicted_tokens_per_s))


def _figures(other: Alternative, planned: float) -> tuple[str, str, str]:
    if other.tokens_per_s is None or other.peak_bytes is None:
        return "does not fit", "", ""
    return f"{other.tokens_per_s:.2f}", format_share(other.tokens_per_s / planned - 1), format_bytes(other.peak_bytes)
