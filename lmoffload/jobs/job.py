"""A job: prompts as token ids, ready for the engine, and the lines that cannot be run."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from lmoffload.errors import StatedError
from lmoffload.executor.request import Request, Sampling
from lmoffload.jobs.lines import BadLine, JobLine
from lmoffload.jobs.text import Text
from lmoffload_solver.model import ModelShape
from lmoffload_solver.workload import Workload, check_length


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for every prompt that does not say otherwise."""

    gen_len: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    log_probabilities: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What the engine is to compute."""

    requests: tuple[Request, ...]
    bad_lines: tuple[BadLine, ...] = ()
    ids: tuple[str, ...] = ()
    """Of all lines as they were read, finished ones included."""

    @property
    def num_lines(self) -> int:
        return len(self.requests) + len(self.bad_lines)

    def rest(self, finished: Collection[str], seed: int) -> Job:
        """What is left when the lines with these ids are finished; requests without a seed get this one."""
        left = [request for request in self.requests if request.id not in finished]
        seeded = [replace(one, sampling=replace(one.sampling, seed=seed)) if one.sampling.seed is None else one for one in left]
        return Job(tuple(seeded), self.bad_lines, self.ids)

    @property
    def workload(self) -> Workload:
        """What the planner needs to know of it.

        Raises:
            StatedError: there is nothing to compute.
        """
        if not self.requests:
            raise StatedError(f"No prompt of the job can be run; the first error is: {self.bad_lines[0].error}")
        lengths = [len(request.token_ids) for request in self.requests]
        return Workload.of_lengths(lengths, max(request.max_new_tokens for request in self.requests))

    def require_sound(self) -> None:
        """Raises:
        StatedError: a line cannot be run.
        """
        if self.bad_lines:
            raise StatedError(self.bad_lines[0].error)


def job_of_lines(lines: Sequence[JobLine | BadLine], text: Text, shape: ModelShape, options: Options) -> Job:
    """Encode the lines of a job file; a line that cannot be encoded becomes a bad line."""
    requests: list[Request] = []
    bad: list[BadLine] = []
    for line in lines:
        if isinstance(line, BadLine):
            bad.append(line)
            continue
        assert line.id is not None
        try:
            requests.append(_request(line, line.id, text, shape, options))
        except StatedError as error:
            bad.append(BadLine(line.id, str(error)))
    return Job(tuple(requests), tuple(bad), tuple(line.id or "" for line in lines))


def synthetic_job(shape: ModelShape, num_prompts: int, prompt_len: int, options: Options) -> Job:
    """`num_prompts` prompts of `prompt_len` random tokens, the same for the same seed."""
    check_length(shape, prompt_len, options.gen_len)
    generator = random.Random(options.sampling.seed or 0)
    requests = []
    for number in range(1, num_prompts + 1):
        ids = tuple(generator.randrange(shape.vocab_size) for _ in range(prompt_len))
        requests.append(Request(str(number), ids, options.gen_len, options.sampling, options.stop, options.log_probabilities))
    return Job(tuple(requests), ids=tuple(request.id for request in requests))


def _request(line: JobLine, line_id: str, text: Text, shape: ModelShape, options: Options) -> Request:
    if line.prompt is not None:
        ids = text.encode(line.prompt)
    else:
        assert line.messages is not None
        ids = text.encode_chat([message.model_dump() for message in line.messages])
    gen_len = line.max_new_tokens or options.gen_len
    check_length(shape, len(ids), gen_len)
    stop = line.stop or options.stop or text.stop_strings
    return Request(line_id, ids, gen_len, line.sampling.over(options.sampling), stop, options.log_probabilities)
