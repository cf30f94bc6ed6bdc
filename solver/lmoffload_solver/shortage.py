"""What is short when nothing fits, by how much, and what would help."""

from __future__ import annotations

from itertools import product

from lmoffload_solver.candidate import Candidate, Domain
from lmoffload_solver.evaluate import Evaluator
from lmoffload_solver.memory import Parts
from lmoffload_solver.outcome import Infeasible
from lmoffload_solver.rounding import Placement


def infeasible(evaluator: Evaluator, domain: Domain) -> Infeasible:
    """Which capacity the plan that needs least lacks most of, and one sentence of advice."""
    memory, weights = evaluator.capacity.memory_bytes, evaluator.capacity.weights_bytes
    options: list[tuple[int, int, Parts, Placement]] = []
    for stream, rounding in evaluator.roundings.items():
        placed = rounding.least()
        for (size, count), chunk, on_disk in product(domain.micro_batches, domain.prefill_chunks, domain.kv_on_disk):
            candidate = Candidate(size, count, min(domain.threads), "", "", 0, stream, prefill_chunk=chunk, kv_on_disk=on_disk)
            if on_disk and not (stream == "layer" and evaluator.kv_fits_disk(candidate)):
                continue
            parts = evaluator.parts(candidate, placed.head_at_home)
            of_weights = 0 if weights is None else placed.memory_bytes + evaluator.memory.vectors_bytes - weights
            options.append((max(0, parts.total + placed.memory_bytes - memory), max(0, of_weights), parts, placed))
    short_memory, short_weights, least, placement = min(options, key=lambda option: (option[0] + option[1], option[0]))
    if short_weights > 0 and short_weights >= short_memory:
        assert weights is not None
        needed = weights + short_weights
        advice = f"Give weights at least {needed} bytes (--weights-memory {_mib(needed)}): one layer's buffers take that much."
        return Infeasible("weights memory", short_weights, advice)
    short = max(short_memory, 1)
    needed = memory + short
    largest = max({**least.always, "layer buffers": placement.memory_bytes, "work": least.phase_bytes}.items(), key=lambda item: item[1])
    causes = {
        "kv": "shorter prompts or a smaller --gen-len would help too, since the KV cache takes most of it",
        "work": "shorter prompts would help too, since the work on one prompt takes most of it",
        "layer buffers": "the buffers of one streamed layer take most of it",
    }
    cause = causes.get(largest[0], "the process itself takes most of it")
    return Infeasible("host memory", short, f"Give the process at least {needed} bytes (--host-memory {_mib(needed)}); {cause}.")


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)}MiB"
