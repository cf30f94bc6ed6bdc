"""Plans at random for one emulated device and for two: bytes of each tier, planned and taken. A device has no more than its plan says."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmoffload_solver.decision import Decision
from lmoffload_solver.pipeline import ALONE, Pipeline, splits
from lmoffload_solver.plan import Plan
from lmoffload_solver.value import Tier

if TYPE_CHECKING:
    from lmoffload.checkpoint import Checkpoint

NEW_TOKENS = 4
LONGEST = 60
KV_FORMATS = ("fp32", "fp32", "bf16", "int8")


@dataclass(frozen=True)
class Taken:
    """A plan that was run. Of the host what comes on top of the process before weights are loaded."""

    choices: str
    planned: dict[Tier, int]
    taken: dict[Tier, int]

    @property
    def within(self) -> bool:
        return all(size <= self.planned[tier] for tier, size in self.taken.items())

    @property
    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"within": self.within}


def capacity(checkpoint: Checkpoint, count: int, folder: Path) -> Iterator[Taken]:
    """Run so many plans, each with devices as large as its plan needs and no larger."""
    from tests.executor.device_plans import device_plan  # what tests draw plans with

    for seed in range(count):
        chance = random.Random(seed)
        lengths = [chance.randint(1, LONGEST) for _ in range(chance.randint(1, 12))]
        decision = _decision(checkpoint, chance)
        roomy = device_plan(checkpoint, decision, lengths, NEW_TOKENS)
        plan = device_plan(checkpoint, decision, lengths, NEW_TOKENS, memory_bytes=roomy.predicted.peak_bytes["device"])
        if not seed:
            _run(checkpoint, plan, lengths, folder, seed)  # libraries load and compile at first use; that is the process's own
        yield _run(checkpoint, plan, lengths, folder, seed)
        gc.collect()


def _decision(checkpoint: Checkpoint, chance: random.Random) -> Decision:
    from tests.executor.device_plans import random_decision

    batches, layers = chance.choice([1, 2, 3, 5]), checkpoint.shape.num_layers
    pipeline = ALONE
    if layers > 1 and chance.random() < 0.4:
        pipeline = Pipeline(chance.choice(list(splits(layers, 2))), chance.randint(1, min(2, batches)))
    return random_decision(
        checkpoint.shape, chance, num_micro_batches=batches, pipeline=pipeline, kv_format=chance.choice(KV_FORMATS)
    )


def _run(checkpoint: Checkpoint, plan: Plan, lengths: list[int], folder: Path, seed: int) -> Taken:
    from benchmarks.tier_runs import in_words
    from lmoffload.executor import Engine, Request

    chance = random.Random(seed)
    texts = [tuple(chance.randrange(1, checkpoint.shape.vocab_size) for _ in range(length)) for length in lengths]
    with Engine(checkpoint, plan, cache=folder) as engine:
        done = engine.generate([Request(str(i), text, NEW_TOKENS) for i, text in enumerate(texts)])
        measured = engine.report().measured
    assert not any(one.error for one in done)
    planned, taken = dict(plan.predicted.peak_bytes), dict(measured.peak_bytes)
    planned["host"] -= plan.predicted.base_bytes
    taken["host"] = max(0, taken["host"] - measured.base_bytes)
    split = f", layers {plan.layers_per_device} in {plan.waves} waves" if plan.layers_per_device else ""
    return Taken(in_words(plan) + split, planned, taken)
