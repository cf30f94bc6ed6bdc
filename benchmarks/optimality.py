"""What the planner promises, on more random cases than the tests take.

python -m benchmarks.optimality [--without-device] [--instances 200] [--monotonic 0] [--gaps 0] [--duals 0]
    --without-device: machines whose host computes, instead of those with a device
    --instances N   small jobs: the search's plan against every plan of the domain
    --monotonic N   pairs of machines, one with more of something: never slower
    --gaps N        larger jobs (of six layers; without a device of 16 to 40, as models have), searched as ever: how much is left unproven
    --duals N       without a device: the price of memory against what a little more gives (with one: tests/solver/test_chain_exact.py)
The last line of stdout is one JSON document; exit 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from lmoffload_solver.chain_search import EFFORT
from tests.solver import chain_instances, host_instances

SAME = 1e-9


def optimality(count: int, of: Any) -> dict[str, float]:
    """The search's seconds over the best of all plans."""
    compared = infeasible = tried = worse = seed = 0
    worst = 0.0
    while compared < count:
        instance = of.random_instance(seed)
        best, plans = of.brute_force(instance)
        search = instance.search()
        found = search.run()
        tried += plans
        if found is None or best is None:
            infeasible += 1
            worse += (found is None) != (best is None)
        else:
            loss = found.simulated.total_s / best - 1
            worst = max(worst, loss)
            if abs(loss) > SAME or abs(search.bound_s / found.simulated.total_s - 1) > SAME:
                worse += 1
                print(f"seed {seed}: slower by {loss:.3%}, bound {search.bound_s:.6g} of {found.simulated.total_s:.6g} s", flush=True)
            compared += 1
        seed += 1
    return {"instances": compared, "infeasible": infeasible, "plans_tried": tried, "broken": worse, "worst_loss": worst}


def monotonic(count: int, of: Any) -> dict[str, float]:
    """More memory, bandwidth or cores never makes the plan slower."""
    slower = compared = 0
    chance = random.Random(1)
    for _ in range(count):
        instance, change = of.random_instance(chance.randrange(10**9)), chance.choice(of.CHANGES)
        before, after = instance.solved(), of.more_of(instance, change).solved()
        if before is not None:
            compared += 1
            slower += after is None or after.simulated.total_s > before.simulated.total_s * (1 + SAME)
    return {"cases": count, "with_a_plan": compared, "broken": slower}


def gaps(count: int, of: Any) -> dict[str, float]:
    """What the search leaves unproven."""
    found = []
    seed = 0
    while len(found) < count:
        if of is host_instances:
            search = of.larger_instance(seed).search()
        else:
            search = of.larger_instance(seed, free=True).search(EFFORT)
        best = search.run()
        if best is not None:
            found.append(1 - search.bound_s / best.simulated.total_s)
        seed += 1
    return {"instances": count, "complete": sum(gap == 0 for gap in found), "median_gap": statistics.median(found), "worst_gap": max(found)}


def duals(count: int, of: Any) -> dict[str, float]:
    """Prices of memory."""
    off: list[float] = []
    seed = 0
    while len(off) < count:
        one = of.off_by(of.larger_instance(seed))
        off += [] if one is None else [one]
        seed += 1
    return {"instances": count, "worst": max(off), "broken": sum(one > 0.02 for one in off)}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--monotonic", type=int, default=0)
    parser.add_argument("--gaps", type=int, default=0)
    parser.add_argument("--duals", type=int, default=0)
    parser.add_argument("--without-device", action="store_true")
    options = parser.parse_args()
    of = host_instances if options.without_device else chain_instances
    document: dict[str, dict[str, float]] = {}
    for name, count, check in (
        ("optimality", options.instances, optimality),
        ("monotonic", options.monotonic, monotonic),
        ("gaps", options.gaps, gaps),
        ("duals", options.duals, duals),
    ):
        if count:
            begin = time.process_time()
            document[name] = check(count, of)
            document[name]["processor_s"] = round(time.process_time() - begin, 1)
            print(f"{name}: {document[name]}", flush=True)
    print(json.dumps(document))
    sys.exit(any(part.get("broken") for part in document.values()))


if __name__ == "__main__":
    main()
