"""A conversation on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from lmoffload.api.asking import Asked
from lmoffload.api.engine import Engine, Wishes
from lmoffload.api.machine import machine_of
from lmoffload.api.model import open_model
from lmoffload.api.planning import solve_for
from lmoffload.api.telling import Tell, tell_on_stderr
from lmoffload.api.work import Work
from lmoffload.errors import StatedError
from lmoffload.report.progress import ProgressBar
from lmoffload_solver.value import Quality
from lmoffload_solver.workload import Limits, Workload

if TYPE_CHECKING:
    from lmoffload.jobs.text import Text

CONTEXT = 2048
"""Tokens of a conversation that are planned for, where the model has so many positions."""
ANSWER = 256
"""Tokens of an answer at most, unless --gen-len says otherwise."""
PROMPT = "> "


class Chat:
    """A conversation: what was said stays in view of the model as far as the plan has room for it."""

    def __init__(self, engine: Engine, wishes: Wishes, tell: Tell = tell_on_stderr) -> None:
        self._engine, self._wishes, self._tell = engine, wishes, tell
        self.messages: list[dict[str, str]] = []

    def answer(self, question: str) -> Iterator[str]:
        """The model's answer, piece by piece. What was told of it stays in the conversation, whatever ends it.

        Raises:
            StatedError: the question alone has no room.
        """
        self.messages.append({"role": "user", "content": question})
        said = ""
        try:
            self._make_room()
            with closing(self._engine.stream(self.messages, **self._wishes)) as chunks:
                for chunk in chunks:
                    said += chunk
                    yield chunk
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                self.messages.pop()

    def _make_room(self) -> None:
        """Forget the oldest turns that no longer fit."""
        room, forgotten = self._engine.plan.workload.max_prompt_len, 0
        while len(self._engine.text.encode_chat(self.messages)) > room and len(self.messages) > 1:
            del self.messages[:2]
            forgotten += 1
        if forgotten:
            self._tell(f"The conversation has become longer than {room} tokens: its beginning is forgotten.")


def run_chat(name: str, work: Work, limits: Limits, machine: str | None, quality: Quality, tell: Tell = tell_on_stderr) -> None:
    """Talk with a model on the terminal until Ctrl-D; Ctrl-C ends an answer.

    Raises:
        NoPlanError: no plan exists within the limits.
        StatedError: the model cannot be read, or has no chat template.
    """
    work.check()
    with ProgressBar() as bar:
        engine = _open(name, work, limits, machine, quality, bar, tell)
    wishes: Wishes = {
        "temperature": work.temperature, "top_p": work.top_p, "top_k": work.top_k, "min_p": work.min_p,
        "repetition_penalty": work.repetition_penalty, "seed": work.seed, "stop": work.stop,
    }  # fmt: skip
    with engine:
        tell("Ctrl-D ends the conversation, Ctrl-C an answer.")
        _talk(Chat(engine, wishes, tell), tell)


def _open(name: str, work: Work, limits: Limits, machine: str | None, quality: Quality, bar: ProgressBar, tell: Tell) -> Engine:
    model = open_model(name)
    checkpoint = model.require_checkpoint()
    on = machine_of(machine, checkpoint.path, on_progress=bar.show_profiling, tell=tell)
    bar.say("loading the tokenizer")
    from lmoffload.jobs.text import Text

    text: Text = Text(checkpoint)
    shortest = len(text.encode_chat([{"role": "user", "content": "?"}]))
    positions = min(model.shape.max_positions or CONTEXT, CONTEXT)
    gen_len = work.gen_len or min(ANSWER, positions // 2)
    if positions - gen_len < shortest:
        raise StatedError(f"The model has {positions} positions, which leave no room for a question before answers of {gen_len} tokens.")
    asked = Asked(quality=quality)
    planned = solve_for(model, on, asked.of(Workload.of_lengths([positions - gen_len], gen_len)), limits)
    bar.say("loading the weights")
    return Engine(planned, text=text, tell=tell, on_store=bar.show_store())


def _talk(chat: Chat, tell: Tell) -> None:
    """Read, answer, and again."""
    with suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited)
    while True:
        try:
            question = input(PROMPT).strip()
        except EOFError:
            print()
            return
        if not question:
            continue
        try:
            for chunk in chat.answer(question):
                sys.stdout.write(chunk)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        except StatedError as error:
            tell(str(error))
        print()
