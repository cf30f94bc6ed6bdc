"""What is measured of a model in a process of its own: `python -m lmoffload.api.child WHAT ARGUMENTS`, as `lmoffload.profiler.child`."""

from __future__ import annotations

import json
import sys
from typing import Any

from lmoffload.environment import prepare_allocator, prepare_threads
from lmoffload.profiler.child import Say, main
from lmoffload_solver.errors import InfeasibleError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.workload import Limits


def importance(say: Say, model: str, windows: list[list[int]], machine: str, limits: str) -> dict[str, Any]:
    """Measure and keep what a model's columns count; whether the limits allow it."""
    for remark in prepare_threads():
        say({"remark": remark})
    prepare_allocator()
    from lmoffload.api.importance import measure_importance
    from lmoffload.api.machine import Machine
    from lmoffload.api.model import open_model

    profile = MachineProfile.model_validate_json(machine)
    try:
        measure_importance(open_model(model), Machine(profile, is_here=True), Limits.model_validate_json(limits), windows)
    except InfeasibleError:
        return {"measured": False}
    return {"measured": True}


if __name__ == "__main__":
    sys.exit(main({"importance": importance}, sys.argv[1], json.loads(sys.argv[2])))
