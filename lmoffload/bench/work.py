"""What every system is asked to do, and what its program answers."""

from __future__ import annotations

from pydantic import Field

from lmoffload_solver.comparison import Figures, Span
from lmoffload_solver.value import Value


class Work(Value):
    """Prompts as token ids; every one is continued greedily by `gen_len` tokens, whatever they are."""

    prompts: tuple[tuple[int, ...], ...] = Field(min_length=1)
    gen_len: int = Field(gt=0)
    repeats: int = Field(default=1, gt=0)
    """How often it is done by one process; the last time counts, so that 2 tell a warm run from the first."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def decode_tokens(self) -> int:
        """Tokens but each row's first, which the prefill gives."""
        return len(self.prompts) * (self.gen_len - 1)

    def first(self, num_prompts: int, gen_len: int) -> Work:
        """The same with fewer prompts and tokens."""
        return self.model_copy(update={"prompts": self.prompts[:num_prompts], "gen_len": min(gen_len, self.gen_len)})


class Answer(Value):
    """What a program of `children` answers; see `children.peer_protocol`."""

    token_ids: tuple[tuple[int, ...], ...]
    load_s: float
    prefill_s: float
    step_s: tuple[float, ...]
    first_token_s: float
    spans: tuple[tuple[str, str, float, float], ...]
    peak_rss_bytes: int
    bytes_read: int
    about: str

    def all_there(self, work: Work) -> bool:
        """Whether every prompt was continued by as many tokens as asked for (by more is its own loss)."""
        return len(self.token_ids) >= len(work.prompts) and all(len(row) >= work.gen_len for row in self.token_ids)

    def told_spans(self) -> tuple[Span, ...]:
        return tuple(Span(lane=lane, name=name, begin_s=begin, end_s=end) for lane, name, begin, end in self.spans)


def figures_of(answer: Answer, work: Work) -> Figures:
    """The figures of some work that was done whole."""
    return figures_for(work, answer.load_s, answer.prefill_s, sum(answer.step_s), answer.first_token_s, answer.step_s)


def figures_for(
    work: Work, load_s: float, prefill_s: float, decode_s: float, first_token_s: float, step_s: tuple[float, ...]
) -> Figures:
    """Figures of some work from its times."""
    return Figures(
        load_s=load_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        first_token_s=first_token_s,
        step_s=step_s,
        prefill_tokens_per_s=work.prompt_tokens / max(prefill_s, 1e-9),
        decode_tokens_per_s=work.decode_tokens / max(decode_s, 1e-9),
        tokens_per_s=len(work.prompts) * work.gen_len / max(prefill_s + decode_s, 1e-9),
    )
