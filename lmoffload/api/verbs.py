"""`plan()` for Python: everything from names and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmoffload.api.engine import Prompt
from lmoffload.api.limits import limits_of
from lmoffload.api.machine import Machine, machine_of
from lmoffload.api.model import open_model
from lmoffload.api.planning import DEFAULT_GEN_LEN, ModelPlan, solve_for, synthetic_workload
from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.environment import prepare_threads
from lmoffload.errors import UsageError
from lmoffload_solver.machine import MachineProfile


def plan(
    model: str | Path,
    *,
    prompts: Sequence[Prompt] | None = None,
    num_prompts: int | None = None,
    prompt_len: int | None = None,
    gen_len: int | None = None,
    machine: MachineProfile | str | None = None,
    host_memory: str | None = None,
    weights_memory: str | None = None,
    threads: int | None = None,
    micro_batch: int | None = None,
    num_micro_batches: int | None = None,
    tell: Tell = tell_on_stderr,
) -> ModelPlan:
    """The best plan for some work with a model on a machine.

    Args:
        model: a folder in Hugging Face layout, a .gguf file, a hub id, or `shape:NAME`.
        prompts: the very prompts that are to be completed; otherwise `num_prompts` of `prompt_len` tokens.
        gen_len: tokens to generate for each.
        machine: a profile of this machine, or the name or file of another's; this machine's own by default, measured now
            where it is not yet known.
        host_memory: a size such as "4GiB" for the whole process.
        weights_memory: a size, or a share of the weights such as "40%".

    Raises:
        InfeasibleError: no plan exists within the limits.
        UsageError: a value has no meaning.
        StatedError: the model or the profile cannot be read.
    """
    limits = limits_of(
        host_memory=host_memory,
        weights_memory=weights_memory,
        threads=threads,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
    )
    opened = open_model(model)
    if prompts is None:
        workload = synthetic_workload(opened.shape, num_prompts, prompt_len, gen_len)
    elif num_prompts is not None or prompt_len is not None:
        raise UsageError("Give either the prompts or their number and length, not both.")
    else:
        prepare_threads()  # the tokenizer loads torch; what is amiss is told by the engine
        from lmoffload.jobs.job import Options, job_of_lines
        from lmoffload.jobs.lines import line_of_prompt
        from lmoffload.jobs.text import Text

        lines = [line_of_prompt(str(number), prompt) for number, prompt in enumerate(prompts, 1)]
        job = job_of_lines(lines, Text(opened.require_checkpoint()), opened.shape, Options(gen_len or DEFAULT_GEN_LEN))
        job.require_sound()
        workload = job.workload
    if isinstance(machine, MachineProfile):
        on = Machine(machine, is_here=True)
    else:
        on = machine_of(machine, opened.path, is_here=False, tell=tell)
    return solve_for(opened, on, workload, limits)
