"""How long the planner takes: models × machines × quality, full search with proof, without measuring anything.

python benchmarks/planner.py [--smoke] [--repeat 3]      the last line of stdout is one JSON document
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from lmoffload.checkpoint import named_shape
from lmoffload.profiler.store import load_profile
from lmoffload_solver.model import LayerShape, ModelShape, TensorShape
from lmoffload_solver.outcome import Infeasible, Optimal, plan_in
from lmoffload_solver.search import solve
from lmoffload_solver.value import Quality, TensorClass
from lmoffload_solver.workload import Limits, PromptGroup, Workload


@dataclass(frozen=True)
class Case:
    """One problem for the planner."""

    model: str
    machine: str
    quality: Quality
    num_prompts: int
    prompt_len: int
    gen_len: int


HUNDRED_LAYERS = "100 layers"
"""Of OPT-175B's width."""

CASES = (
    Case(HUNDRED_LAYERS, "t4-gcp", "any", 256, 512, 32),
    Case(HUNDRED_LAYERS, "t4-gcp", "any", 64, 512, 32),
    Case(HUNDRED_LAYERS, "t4-gcp", "any", 1000, 128, 64),
    Case(HUNDRED_LAYERS, "a100-40gb-pcie4", "any", 256, 512, 32),
    Case("opt-175b", "t4-gcp", "exact", 256, 512, 32),
    Case("opt-30b", "t4-gcp", "int4", 144, 512, 32),
    Case("llama-2-70b", "a6000", "any", 64, 512, 32),
    Case("opt-13b", "v100-32gb", "int4", 32, 512, 100),
    Case("llama-1.1b", "xeon-avx512-2-cores", "exact", 64, 256, 32),
)

SMOKE = (CASES[0], Case("opt-6.7b", "t4-gcp", "exact", 16, 128, 8))


@dataclass(frozen=True)
class Figure:
    """What solving a case took and gave."""

    case: Case
    outcome: str
    seconds: float
    """The best of the repetitions."""
    processor_s: float
    """What of a processor's time that took; others may use the machine."""
    programs_solved: int
    tokens_per_s: float
    gap: float


def shape_of(name: str) -> ModelShape:
    """A model known by name, or the hundred layers."""
    if name != HUNDRED_LAYERS:
        return named_shape(name)
    hidden, layers, vocab = 12288, 100, 50000
    matrices: tuple[tuple[str, tuple[int, int], TensorClass], ...] = (
        *((part, (hidden, hidden), "attention") for part in ("q", "k", "v", "o")),
        ("gate", (4 * hidden, hidden), "mlp"),
        ("up", (4 * hidden, hidden), "mlp"),
        ("down", (hidden, 4 * hidden), "mlp"),
    )
    tensors = [
        TensorShape(name=f"{layer}.{part}", shape=shape, format="bf16", tensor_class=name_of, layer=layer, is_matrix=True)
        for layer in range(layers)
        for part, shape, name_of in matrices
    ]
    for table, name_of in (("embed", "embedding"), ("head", "head")):
        tensors.append(TensorShape(name=table, shape=(vocab, hidden), format="bf16", tensor_class=name_of, is_matrix=True))  # type: ignore[arg-type]
    layer_shape = LayerShape(num_heads=96, num_kv_heads=96, key_dim=128, value_dim=128)
    return ModelShape(
        name=name,
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        vocab_size=vocab,
        layers=(layer_shape,) * layers,
        tensors=tuple(tensors),
        tied_head=False,
    )


def measured(case: Case, repeat: int) -> Figure:
    """Solve a case; what is read and imported before is not counted."""
    model, machine = shape_of(case.model), load_profile(case.machine)
    work = Workload(prompts=(PromptGroup(length=case.prompt_len, count=case.num_prompts),), gen_len=case.gen_len, quality=case.quality)
    taken: list[tuple[float, float]] = []
    for _ in range(repeat):
        begin, processor = time.perf_counter(), time.process_time()
        outcome = solve(model, machine, work, Limits())
        taken.append((time.perf_counter() - begin, time.process_time() - processor))
    best = [min(column) for column in zip(*taken, strict=True)]
    plan = plan_in(outcome)
    name = "optimal" if isinstance(outcome, Optimal) else "infeasible" if isinstance(outcome, Infeasible) else "time limit"
    if plan is None:
        return Figure(case, name, *best, 0, 0.0, 0.0)
    return Figure(case, name, *best, plan.programs_solved, plan.predicted.tokens_per_s, plan.gap)


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two cases, once each: a few seconds")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, of which the best counts")
    options = parser.parse_args()
    measured(Case("opt-6.7b", "t4-gcp", "exact", 1, 8, 2), 1)  # imports, and the first call of each library
    table = Table("model", "machine", "quality", "prompts × length + new", "seconds", "programs", "tokens/s", "gap", "outcome")
    figures = []
    for case in SMOKE if options.smoke else CASES:
        figure = measured(case, 1 if options.smoke else options.repeat)
        figures.append(figure)
        work = f"{case.num_prompts} × {case.prompt_len} + {case.gen_len}"
        numbers = (f"{figure.seconds:.2f}", str(figure.programs_solved), f"{figure.tokens_per_s:.3g}", f"{figure.gap:.2%}")
        table.add_row(case.model, case.machine, case.quality, work, *numbers, figure.outcome)
    Console(file=sys.stdout, width=140).print(table)
    print(json.dumps([asdict(figure) for figure in figures]))
    if any(figure.outcome == "time limit" for figure in figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
