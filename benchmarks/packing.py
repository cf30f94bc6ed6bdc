"""Throughput of a job of prompts and completions of any length: as it is run, and as batches of the file's own order would be.

    python -m benchmarks.packing --prompts 96

Each way computes the same job by the same plan, in turn, and the useful tokens are those of the completions asked for:

* fixed: batches of as many prompts as a block has places, in the file's order, each filled up to its longest prompt and run until its
  longest completion is done, as engines that know no packing do;
* packed: the same batches without filling up;
* sorted: longest first, places stay free until their block ends;
* refilled: longest first, waiting prompts take free places.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.environment import prepare_threads

if TYPE_CHECKING:
    from lmoffload.executor import Request

SHORTEST, LONGEST, MOST_NEW = 5, 900, 64


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Compare ways to cut a job into batches.")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=192)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prepare_threads()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder), chosen.prompts, chosen.repeats, chosen.hidden), indent=2))


def measured(folder: Path, num_prompts: int, repeats: int, hidden: int) -> dict[str, object]:
    """Useful tokens per second and per second of the processors' time (which other processes do not disturb) of each way, the best of some
    repeats, and what it had in vain."""
    from lmoffload.checkpoint import open_checkpoint
    from lmoffload.executor import Engine, Request
    from tests.executor.plans import make_plan
    from tests.models import tiny_checkpoint

    options = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "max_position_embeddings": 1024}
    checkpoint = open_checkpoint(tiny_checkpoint("llama", folder / "model", num_layers=4, **options))
    chance = random.Random(0)
    requests = [
        Request(str(i), tuple(chance.randrange(3, checkpoint.shape.vocab_size) for _ in range(chance.randint(SHORTEST, LONGEST))),
                chance.randint(1, MOST_NEW))
        for i in range(num_prompts)
    ]  # fmt: skip
    plan = make_plan(checkpoint.shape, checkpoint.fingerprint, resident=set(), micro_batch=8, num_micro_batches=2, tokens=1000)
    places = plan.micro_batch * plan.num_micro_batches
    batches = [requests[at : at + places] for at in range(0, num_prompts, places)]
    ways = {
        "fixed": ([filled_up(batch) for batch in batches], None),
        "packed": (batches, None),
        "sorted": ([requests], None),
        "refilled": ([requests], 1),
    }
    useful, found = sum(request.max_new_tokens for request in requests), {}
    for name, (jobs, refill) in ways.items():
        seconds, processor_s = [], []
        for _ in range(repeats):
            with Engine(checkpoint, plan.model_copy(update={"refill": refill})) as engine:
                begin, worked = time.perf_counter(), time.process_time()
                for job in jobs:
                    engine.generate(job)
                seconds.append(time.perf_counter() - begin)
                processor_s.append(time.process_time() - worked)
                waste = engine.report().waste
        assert waste is not None
        found[name] = {
            "tokens_per_s": useful / min(seconds), "tokens_per_processor_s": useful / min(processor_s), **waste.model_dump()
        }  # fmt: skip
    return {"prompts": num_prompts, "useful_tokens": useful, "places": places, **found}


def filled_up(batch: Sequence[Request]) -> list[Request]:
    """Every prompt as long as the longest, every completion too."""
    longest, new = max(len(one.token_ids) for one in batch), max(one.max_new_tokens for one in batch)
    return [replace(one, token_ids=(one.token_ids * longest)[:longest], max_new_tokens=new) for one in batch]


if __name__ == "__main__":
    main()
