"""This engine against llama.cpp, both with all weights in memory in 4 bits: interleaved rounds, medians.

python benchmarks/resident.py MODEL [--gguf FILE] [--python INTERPRETER] [--machine NAME] [--rounds 3] [--sweep]
MODEL is a checkpoint of the Llama family; its Q4_0 copy is written beside it where FILE is not there yet. INTERPRETER has llama-cpp-python.
With --sweep llama.cpp's settings are tried first and the best one is used for each figure. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lmoffload.api.machine import machine_of
from lmoffload.api.model import Model, open_model
from lmoffload.api.telling import tell_on_stderr
from lmoffload.bench.gguf_copy import write_gguf
from lmoffload.bench.peer import Conditions, Peer, attempt
from lmoffload.bench.peers import Contestant, llama_cpp_peer
from lmoffload.bench.work import Work
from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload_solver.comparison import Granted, Settings
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.outcome import plan_in
from lmoffload_solver.plan import Plan
from lmoffload_solver.search import solve
from lmoffload_solver.workload import Limits, Workload

SIZES: Mapping[str, tuple[int, int, int]] = {"32 prompts": (32, 32, 8), "one stream": (1, 64, 24)}
"""Prompts, their length, new tokens."""
FIGURES: Mapping[str, tuple[str, str]] = {
    "prefill": ("32 prompts", "prefill"),
    "decode at 32": ("32 prompts", "decode"),
    "one stream": ("one stream", "decode"),
}
"""Figure -> the work it is seen in, and the phase."""
SWEEP: tuple[Settings, ...] = tuple(
    {"threads": threads, "flash_attention": flash, **more}
    for threads, flash, more in product((2, 1), (True, False), ({}, {"unified": True}, {"ubatch": 1024}, {"repack": False}))
    if threads == 2 or (flash and not more)
)
REPEATS = 2
"""The first time through warms up; the last one counts."""


@dataclass(frozen=True)
class Contest:
    """Who runs what."""

    model: Model
    machine: MachineProfile
    peer: Peer
    works: Mapping[str, Work]

    def plan(self, work: Work) -> Plan:
        """The planner's own of class int4, all in memory."""
        shaped = Workload.of_lengths([len(prompt) for prompt in work.prompts], work.gen_len).model_copy(update={"quality": "int4"})
        plan = plan_in(solve(self.model.shape, self.machine, shaped, Limits(), model_fingerprint=self.model.digest))
        assert plan is not None and not plan.weights.bytes["disk"], "the model fits into memory"
        return plan

    def ours(self, work: Work) -> tuple[float, float]:
        """Seconds of prefill and of decode."""
        from lmoffload.executor import Engine, Request, Sampling  # loads torch, whose environment `main` prepares

        requests = [Request(str(i), prompt, work.gen_len, Sampling(temperature=0.0)) for i, prompt in enumerate(work.prompts)]
        with Engine(replace(self.model.require_checkpoint(), generation_config=None, config=self.endless), self.plan(work)) as engine:
            for _ in range(REPEATS):
                before = engine.meter.prefill_s, engine.meter.decode_s
                engine.generate(requests)
            return engine.meter.prefill_s - before[0], engine.meter.decode_s - before[1]

    @property
    def endless(self) -> Mapping[str, object]:
        """The model's configuration without an end token, of which llama.cpp is not told either."""
        return {**self.model.require_checkpoint().config, "eos_token_id": None}

    def theirs(self, work: Work, settings: Settings) -> tuple[float, float]:
        """Seconds of prefill and of decode."""
        conditions = Conditions(Granted(enforced=False), Path(tempfile.gettempdir()), timeout_s=3600.0, drop_cache=False)
        run = attempt(self.peer, work, {**self.peer.default, **settings, "batch": None}, conditions).run
        if run.figures is None:
            raise StatedError(f"llama.cpp, {run.status}: {run.sentence}")
        return run.figures.prefill_s, run.figures.decode_s


def speeds(work: Work, seconds: tuple[float, float]) -> dict[str, float]:
    """Tokens a second of each phase."""
    return {"prefill": work.prompt_tokens / seconds[0], "decode": work.decode_tokens / seconds[1]}


def best_settings(contest: Contest, console: Console) -> dict[str, Settings]:
    """llama.cpp's best setting for each figure."""
    table = Table("llama.cpp", *FIGURES, title="Sweep, tokens/s")
    found: dict[str, list[tuple[float, Settings]]] = {figure: [] for figure in FIGURES}
    for choice in SWEEP:
        settings = dict(choice)
        seen = {name: speeds(work, contest.theirs(work, settings)) for name, work in contest.works.items()}
        for figure, (work, phase) in FIGURES.items():
            found[figure].append((seen[work][phase], settings))
        table.add_row(", ".join(f"{k}={v}" for k, v in choice.items()), *(f"{found[figure][-1][0]:.1f}" for figure in FIGURES))
    console.print(table)
    return {figure: max(tried, key=lambda one: one[0])[1] for figure, tried in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--machine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    prepare_threads()
    prepare_allocator()
    console, model = Console(width=160), open_model(options.model)
    gguf = options.gguf or Path(f"{options.model.rstrip('/')}-q4_0.gguf")
    if not gguf.exists():
        write_gguf(model.require_checkpoint(), gguf, "q4_0")
    machine = machine_of(options.machine, model.path, is_here=True, tell=tell_on_stderr).profile
    random_ids = random.Random(1)
    works = {
        name: Work(
            prompts=tuple(tuple(random_ids.randrange(model.shape.vocab_size) for _ in range(length)) for _ in range(count)),
            gen_len=gen_len,
            repeats=REPEATS,
        )
        for name, (count, length, gen_len) in SIZES.items()
    }
    checkpoint = model.require_checkpoint()
    of = Contestant(model.shape, checkpoint.path, not checkpoint.is_gguf, 1, 2, None, options.python or Path(sys.executable))
    contest = Contest(model, machine, llama_cpp_peer(of, gguf, "q4_0", comparable=False, refusal=None), works)
    settings = best_settings(contest, console) if options.sweep else dict.fromkeys(FIGURES, contest.peer.default)
    ours: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    theirs: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for _ in range(options.rounds):
        for name, work in works.items():
            mine, seen = speeds(work, contest.ours(work)), dict[str, dict[str, float]]()
            for figure, phase in ((figure, phase) for figure, (of, phase) in FIGURES.items() if of == name):
                chosen = settings[figure]
                if (key := json.dumps(chosen)) not in seen:
                    seen[key] = speeds(work, contest.theirs(work, chosen))
                ours[figure].append(mine[phase])
                theirs[figure].append(seen[key][phase])
    table = Table("tokens/s", "lmoffload", "llama.cpp Q4_0", "ratio of medians", "llama.cpp's setting")
    ratios = {figure: statistics.median(ours[figure]) / statistics.median(theirs[figure]) for figure in FIGURES}
    for figure in FIGURES:
        cells = [f"{statistics.median(seen):.1f} ({min(seen):.1f} to {max(seen):.1f})" for seen in (ours[figure], theirs[figure])]
        table.add_row(figure, *cells, f"{ratios[figure]:.2f}", json.dumps(settings[figure]))
    console.print(table)
    print(json.dumps({"ratios": ratios, "lmoffload": ours, "llama.cpp": theirs}))


if __name__ == "__main__":
    main()
