"""Memory that is computed with, before anything is."""

from __future__ import annotations

from lmoffload.executor.buffers import Slab
from lmoffload_solver import counting
from lmoffload_solver.arena_memory import working_bytes
from lmoffload_solver.memory import JobMemory, breakdown
from lmoffload_solver.model import ModelShape
from lmoffload_solver.plan import Plan, on_device


def touch_working(shape: ModelShape, plan: Plan) -> None:
    """Have the system give what a micro-batch's prompts are computed with, and take it back. On a virtual machine, memory that its host has
    to give takes ten times as long as what was in use a moment ago: it takes that long as an engine is opened, not in its first step."""
    if not on_device(plan):
        num_bytes = breakdown(shape, plan)["transient"]
    elif plan.limits.emulated_device is not None:
        rows, longest = plan.micro_batch, plan.workload.max_prompt_len
        memory, tokens = JobMemory(shape, plan.workload, 0), rows * longest + counting.token_multiple(shape)
        num_bytes = int(working_bytes(memory, tokens, rows, longest, plan.threads.get("compute", 1)))
    else:
        return  # a device's own memory
    Slab(num_bytes).bytes.zero_()
