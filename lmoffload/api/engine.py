"""The engine as people use it: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lmoffload.api.importance import require_importance
from lmoffload.api.machine import Machine
from lmoffload.api.planning import ModelPlan, check_fits
from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.environment import prepare_threads
from lmoffload.errors import StatedError
from lmoffload_solver.plan import Plan, on_device

if TYPE_CHECKING:
    from lmoffload.checkpoint import StoreProgress
    from lmoffload.executor import Completion, Progress
    from lmoffload.jobs.job import Job
    from lmoffload.jobs.results import Result
    from lmoffload.jobs.text import Text
    from lmoffload_solver.report import RunReport
    from lmoffload_solver.simulate import Timed
    from lmoffload_solver.workload import Workload

Prompt = str | Sequence[Mapping[str, str]]
"""Raw text, or the messages of a conversation for the model's chat template."""


class Engine:
    """Runs a plan: opens the checkpoint, takes the memory that the plan says, and completes prompts. A context manager.

    Args:
        model_plan: from `lmoffload.plan`.
        text: the model's tokenizer where it is loaded already.
        tell: takes remarks; they go to standard error by default.
        on_store: called while weights are quantized that the plan keeps in another format than the checkpoint, after every tensor.
        keep_spans: keep what `trace` tells.

    Raises:
        UsageError: the plan is for a shape without weights.
        StatedError: the plan does not hold on this checkpoint.
    """

    def __init__(
        self,
        model_plan: ModelPlan,
        *,
        text: Text | None = None,
        tell: Tell = tell_on_stderr,
        on_store: Callable[[StoreProgress], None] = lambda progress: None,
        keep_spans: bool = False,
    ) -> None:
        checkpoint = model_plan.model.require_checkpoint()
        self._remarks = prepare_threads()
        for remark in self._remarks:
            tell(remark)
        from lmoffload import executor
        from lmoffload.jobs.text import Text

        self.plan = model_plan.plan
        self.text = text or Text(checkpoint)
        self._model_plan = model_plan
        require_importance(model_plan, self.text, tell)
        self._engine = executor.Engine(
            checkpoint,
            self.plan,
            decode=self.text.decode,
            tokenizer_eos=self.text.end_token_id,
            on_store=on_store,
            keep_spans=keep_spans,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        gen_len: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """Complete every prompt; completions in the order of the prompts.

        Args:
            prompts: texts, or conversations (`[{"role": "user", "content": "..."}]`).
            gen_len: tokens to generate at most, the plan's by default.
            temperature: 0 is greedy; this and the next three follow the model's own generation configuration where None.
            stop: strings that end a completion, and are left out of it.

        Raises:
            StatedError: a prompt cannot be encoded, or exceeds what the plan has room for.
        """
        from lmoffload.executor import Sampling
        from lmoffload.jobs.job import Options, job_of_lines
        from lmoffload.jobs.lines import line_of_prompt

        options = Options(gen_len or self.plan.workload.gen_len, Sampling(temperature, top_p, top_k, seed), tuple(stop))
        lines = [line_of_prompt(str(number), prompt) for number, prompt in enumerate(prompts, 1)]
        job = job_of_lines(lines, self.text, self._model_plan.model.shape, options)
        job.require_sound()
        results: dict[str, Result] = {}
        self.run(job, lambda result: results.__setitem__(result.id, result))
        return [results[str(number)].completion for number in range(1, len(prompts) + 1)]

    def run(
        self,
        job: Job,
        on_result: Callable[[Result], None],
        on_progress: Callable[[Progress], None] | None = None,
        short: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run a job; `on_result` is called with every line's result as soon as it is known, `short` after every step: where it says that
        memory is short, the block becomes smaller.

        Raises:
            StatedError: the plan has no room for the job, or a device failed.
        """
        from lmoffload.jobs.results import Result

        stops = {request.id: request.stop for request in job.requests}
        check_fits(job.workload, self.plan)
        for line in job.bad_lines:
            on_result(Result.of_bad_line(line))

        def finish(completion: Completion) -> None:
            on_result(Result.of_completion(completion, self.text.decode_until(completion.token_ids, stops[completion.id])))

        self._engine.generate(job.requests, finish, on_progress, short)

    def report(self) -> RunReport:
        """What has been run so far, predicted and measured."""
        from lmoffload_solver.report import phase_figures

        report = self._engine.report()
        known: dict[str, object] = {"remarks": tuple(dict.fromkeys((*report.remarks, *self._remarks)))}
        if report.performed is not None:
            known["performed"] = performed = report.performed.model_copy(update={"file_system": self._file_system()})
            with suppress(StatedError):  # a format that the profile does not know
                known["phases"] = phase_figures(performed, self._model_plan.machine)
        return report.model_copy(update=known)

    def trace(self, workload: Workload) -> dict[str, Any]:
        """The timelines of the first block of the work that was run, predicted and measured, as a document of Chrome's trace format."""
        from lmoffload.report.trace import trace_document
        from lmoffload_solver.timeline import PlanCosts, block_timeline

        made = self._model_plan
        plan = made.plan.model_copy(update={"workload": workload})
        if on_device(plan):
            return trace_document(self._engine.units, self._device_timeline(plan), self._engine.meter.spans)
        costs = PlanCosts(made.model.shape, made.machine, plan, file_system=self._file_system())
        return trace_document(self._engine.units, block_timeline(costs), self._engine.meter.spans)

    def _device_timeline(self, plan: Plan) -> list[Timed]:
        from lmoffload_solver.chain_plan import decision_of
        from lmoffload_solver.chain_predict import chain_timeline, costs_of
        from lmoffload_solver.decision import Job as Priced

        model, machine = self._model_plan.model.shape, self._model_plan.machine
        decision = decision_of(model, plan)
        return chain_timeline(Priced(model, plan.workload), costs_of(machine, decision, self._file_system()), decision, every_step=True)

    def _file_system(self) -> str | None:
        """The mount point of the disk that is read, where the profile knows it."""
        return Machine(self._model_plan.machine, is_here=True).disk_for(self._model_plan.model.path)

    def close(self) -> None:
        """End every thread and give the memory back; the engine cannot be used afterwards."""
        self._engine.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
