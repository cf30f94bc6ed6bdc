"""FlexLLMGen's five-line summary (FMInference/FlexLLMGen, flexllmgen/utils.py, `write_benchmark_log`), so that logs compare."""

from __future__ import annotations

from collections.abc import Iterator

from lmoffload.report.comparison_tables import label_of, row_state, rows_of
from lmoffload_solver.comparison import Comparison, Run

GB = 1 << 30
"""What FlexLLMGen calls GB."""


def summaries(comparison: Comparison) -> str:
    """The summary of every row's median run under the row's name; systems without one are named with the reason."""
    return "\n".join(_summaries(comparison))


def _summaries(comparison: Comparison) -> Iterator[str]:
    for system in comparison.systems:
        if not system.rows:
            yield f"# {system.name}: {system.status}: {system.sentence}"
    for system, row in rows_of(comparison):
        run = row.middle
        yield f"# {label_of(system, row)}" + ("" if run is not None else f": {row_state(row)}")
        if run is not None:
            yield summary(comparison, run)


def summary(comparison: Comparison, run: Run) -> str:
    """Five lines. The device is FlexLLMGen's "gpu": 0 without one."""
    figures = run.figures
    assert figures is not None
    return (
        f"model size: {comparison.model_bytes / GB:.3f} GB\t"
        f"cache size: {comparison.kv_bytes / GB:.3f} GB\t"
        f"hidden size (p): {comparison.hidden_bytes / GB:.3f} GB\n"
        f"peak gpu mem: {0:.3f} GB\t"
        f"projected: {run.status == 'projected'}\n"
        f"prefill latency: {figures.prefill_s:.3f} s\t"
        f"prefill throughput: {figures.prefill_tokens_per_s:.3f} token/s\n"
        f"decode latency: {figures.decode_s:.3f} s\t"
        f"decode throughput: {figures.decode_tokens_per_s:.3f} token/s\n"
        f"total latency: {figures.total_s:.3f} s\t"
        f"total throughput: {figures.tokens_per_s:.3f} token/s"
    )
