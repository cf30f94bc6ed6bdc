"""A conversation on the terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lmoffload
from lmoffload.api.chat import Chat
from lmoffload.errors import StatedError
from tests.cli.conftest import Call, make_model

MOST_S = 60


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        self._end, its_end = pty.openpty()
        command = [sys.executable, "-m", "lmoffload", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True)
        os.close(its_end)
        self.shown = ""

    def until(self, word: str) -> str:
        """What is shown until a word is, the word included."""
        end = time.monotonic() + MOST_S
        while word not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self._end], [], [], 0.2)[0]:
                self.shown += os.read(self._end, 65536).decode(errors="replace")
        before, _, self.shown = self.shown.partition(word)
        return before + word

    def write(self, text: str) -> None:
        os.write(self._end, text.encode())

    def close(self) -> int:
        code = self.process.wait(MOST_S)
        os.close(self._end)
        return code


def test_questions_are_answered_until_the_end_of_input(profiled: Path, model: Path) -> None:
    terminal = Terminal("run", model, "--gen-len", "8", "--temperature", "0")
    terminal.until("Ctrl-D ends")
    answers = []
    for question in ("Hello", "Hello again"):
        terminal.until("> ")
        terminal.write(question + "\n")
        terminal.until(question)
        terminal.until("\n")
        answers.append(terminal.until("\n").strip())
    assert all(answers) and answers[0] != answers[1]
    terminal.until("> ")
    terminal.write("\x04")
    assert terminal.close() == 0


def test_without_a_terminal_prompts_are_wanted(call: Call, profiled: Path, model: Path) -> None:
    shown = call("run", model)
    assert shown.code == 2
    assert "Nothing to complete" in shown.sentence


def test_the_oldest_turns_are_forgotten(profiled: Path, model: Path) -> None:
    told: list[str] = []
    question = "How are you today?"
    plan = lmoffload.plan(model, num_prompts=1, prompt_len=90, gen_len=6)
    with lmoffload.Engine(plan) as engine:
        chat = Chat(engine, {"temperature": 0}, told.append)
        first = "".join(chat.answer(question))
        assert chat.messages == [{"role": "user", "content": question}, {"role": "assistant", "content": first}]
        assert first == engine.generate([chat.messages[:1]], temperature=0, gen_len=6)[0]
        for _ in range(4):
            seen = [*chat.messages, {"role": "user", "content": question}]
            answer = "".join(chat.answer(question))
        assert told and set(told) == {"The conversation has become longer than 90 tokens: its beginning is forgotten."}
        assert chat.messages[-2] == seen[-1]
        assert answer == engine.generate([chat.messages[:-1]], temperature=0, gen_len=6)[0]
        before = list(chat.messages)
        with pytest.raises(StatedError, match="room for a prompt of 90"):
            list(chat.answer("a" * 200))
        assert len(chat.messages) <= len(before)
        left = chat.answer(question)
        begun = next(iter(left))
        left.close()  # type: ignore[attr-defined]
        assert chat.messages[-1] == {"role": "assistant", "content": begun}


def test_a_model_without_a_template(profiled: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "untaught")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    terminal = Terminal("run", folder)
    terminal.until("has no chat template")
    assert terminal.close() == 1
