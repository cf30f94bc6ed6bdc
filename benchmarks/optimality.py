"""What the planner for machines with a device promises, on more random cases than the tests take.

python -m benchmarks.optimality [--instances 200] [--monotonic 0] [--gaps 0]
    --instances N   small jobs: the search's plan against every plan of the domain
    --monotonic N   pairs of machines, one with more of something: never slower
    --gaps N        jobs of six layers, searched with the default effort: how much is left unproven
The last line of stdout is one JSON document; exit 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

from lmoffload_solver.chain_search import EFFORT
from tests.solver.chain_instances import CHANGES, brute_force, larger_instance, more_of, random_instance

SAME = 1e-9


def optimality(count: int) -> dict[str, float]:
    """The search's seconds over the best of all plans."""
    compared = infeasible = tried = worse = seed = 0
    worst = 0.0
    while compared < count:
        instance = random_instance(seed)
        best, plans = brute_force(instance)
        search = instance.search()
        found = search.run()
        tried += plans
        if found is None or best is None:
            infeasible += 1
            worse += (found is None) != (best is None)
        else:
            loss = found.simulated.total_s / best - 1
            worst = max(worst, loss)
            worse += abs(loss) > SAME or search.bound_s != found.simulated.total_s
            compared += 1
        seed += 1
    return {"instances": compared, "infeasible": infeasible, "plans_tried": tried, "broken": worse, "worst_loss": worst}


def monotonic(count: int) -> dict[str, float]:
    """More memory, bandwidth or cores never makes the plan slower."""
    slower = compared = 0
    chance = random.Random(1)
    for _ in range(count):
        instance, change = random_instance(chance.randrange(10**9)), chance.choice(CHANGES)
        before, after = instance.solved(), more_of(instance, change).solved()
        if before is not None:
            compared += 1
            slower += after is None or after.simulated.total_s > before.simulated.total_s * (1 + SAME)
    return {"cases": count, "with_a_plan": compared, "broken": slower}


def gaps(count: int) -> dict[str, float]:
    """What the search leaves unproven."""
    found = []
    seed = 0
    while len(found) < count:
        instance = larger_instance(seed, free=True)
        search = instance.search(EFFORT)
        best = search.run()
        if best is not None:
            found.append(1 - search.bound_s / best.simulated.total_s)
        seed += 1
    return {"instances": count, "complete": sum(gap == 0 for gap in found), "median_gap": statistics.median(found), "worst_gap": max(found)}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--monotonic", type=int, default=0)
    parser.add_argument("--gaps", type=int, default=0)
    options = parser.parse_args()
    document: dict[str, dict[str, float]] = {}
    for name, count, check in (
        ("optimality", options.instances, optimality),
        ("monotonic", options.monotonic, monotonic),
        ("gaps", options.gaps, gaps),
    ):
        if count:
            begin = time.process_time()
            document[name] = check(count)
            document[name]["processor_s"] = round(time.process_time() - begin, 1)
            print(f"{name}: {document[name]}", flush=True)
    print(json.dumps(document))
    sys.exit(any(part.get("broken") for part in document.values()))


if __name__ == "__main__":
    main()
