"""Work as people ask for it: one text, a file of lines, or synthetic prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmoffload.api.model import Model
from lmoffload.api.planning import DEFAULT_GEN_LEN, synthetic_workload
from lmoffload.errors import UsageError
from lmoffload_solver.model import ModelShape
from lmoffload_solver.workload import Workload

if TYPE_CHECKING:
    from lmoffload.jobs.job import Job, Options
    from lmoffload.jobs.text import Text


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be completed, and how tokens are chosen; None leaves a choice to the model's generation configuration."""

    prompt: str | None = None
    chat: bool = False
    input_file: Path | None = None
    num_prompts: int | None = None
    prompt_len: int | None = None
    gen_len: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def is_synthetic(self) -> bool:
        return self.num_prompts is not None or self.prompt_len is not None

    @property
    def options(self) -> Options:
        """What holds for every line that does not say otherwise."""
        from lmoffload.executor import Sampling
        from lmoffload.jobs.job import Options

        sampling = Sampling(self.temperature, self.top_p, self.top_k, self.seed)
        return Options(self.gen_len or DEFAULT_GEN_LEN, sampling, self.stop)

    @property
    def source(self) -> str:
        """Where the prompts come from, in words."""
        return "synthetic prompts" if self.input_file is None else str(self.input_file)

    def check(self) -> None:
        """Raises:
        UsageError: two kinds of work are asked for, or a value has no meaning.
        """
        kinds = [self.prompt is not None, self.input_file is not None, self.is_synthetic]
        if sum(kinds) > 1:
            raise UsageError("Give one of -p TEXT, --input FILE, or --num-prompts and --prompt-len.")
        if self.chat and self.prompt is None:
            raise UsageError("--chat wraps the text of -p; give that, or messages in the lines of --input.")
        if self.gen_len is not None and self.gen_len < 1:
            raise UsageError(f"The number given for gen-len is {self.gen_len}; it must be at least 1.")
        for name, value, most in (
            ("temperature", self.temperature, None),
            ("top-p", self.top_p, 1),
            ("top-k", self.top_k, None),
            ("seed", self.seed, 2**63 - 1),
        ):
            if value is not None and not (value >= 0 if most is None else 0 <= value <= most):
                raise UsageError(f"The {name} is {value}; it must be at least 0" + (f" and at most {most}." if most else "."))
        if "" in self.stop:
            raise UsageError("A stop text must not be empty.")

    def require_prompts(self) -> None:
        """Raises:
        UsageError: nothing is asked for.
        """
        if self.prompt is None and self.input_file is None and not self.is_synthetic:
            raise UsageError("Nothing to complete: give -p TEXT, --input FILE, or --num-prompts and --prompt-len.")

    def workload(self, model: Model) -> Workload:
        """What the planner needs to know. Synthetic work needs no tokenizer; a file's lengths do.

        Raises:
            StatedError: no line of the file can be run.
        """
        if self.input_file is None:
            return synthetic_workload(model.shape, self.num_prompts, self.prompt_len, self.gen_len)
        from lmoffload.jobs.text import Text

        return self.job(Text(model.require_checkpoint()), model.shape).workload

    def job(self, text: Text, shape: ModelShape) -> Job:
        """The requests for the engine.

        Raises:
            StatedError: the file cannot be read, or the one text cannot be encoded.
        """
        from lmoffload.jobs.job import job_of_lines, synthetic_job
        from lmoffload.jobs.lines import line_of_prompt, read_lines

        options = self.options
        if self.input_file is not None:
            return job_of_lines(read_lines(self.input_file), text, shape, options)
        if self.prompt is not None:
            prompt = [{"role": "user", "content": self.prompt}] if self.chat else self.prompt
            job = job_of_lines([line_of_prompt("1", prompt)], text, shape, options)
            job.require_sound()
            return job
        workload = synthetic_workload(shape, self.num_prompts, self.prompt_len, self.gen_len)
        group = workload.prompts[0]
        return synthetic_job(shape, group.count, group.length, replace(options, gen_len=workload.gen_len))
