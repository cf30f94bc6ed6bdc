"""Streams: pieces that together are the completion, callbacks, async, and what ends them (case G6)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmoffload
from lmoffload.checkpoint import open_checkpoint
from lmoffload.errors import StatedError
from lmoffload.jobs.stream import TextStream
from lmoffload.jobs.text import Text

PROMPTS = ["One two", "The sea is", "Three"]
GEN_LEN = 12


@pytest.fixture
def engine(profiled: Path, model: Path) -> Iterator[lmoffload.Engine]:
    plan = lmoffload.plan(model, prompts=PROMPTS, gen_len=GEN_LEN, weights_memory="60%", micro_batch=2, num_micro_batches=1)
    with lmoffload.Engine(plan) as engine:
        yield engine


@pytest.fixture(scope="session")
def text(model: Path) -> Text:
    return Text(open_checkpoint(model))


@pytest.mark.parametrize("whole", ["안녕하세요 🙂👩‍👩‍👧 é", "plain", "🙂", "\ufffd ends with one \ufffd"])
def test_pieces_are_the_whole_text(text: Text, whole: str) -> None:
    """Byte by byte, so that every character comes in parts."""
    ids = text.encode(whole)
    stream = TextStream(text, ())
    pieces = [stream.more(ids[:count]) for count in range(1, len(ids) + 1)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole
    pieces.append(stream.end(text.decode(ids)))
    assert "".join(pieces) == text.decode(ids) == whole
    assert stream.more(ids) == ""


def test_nothing_of_a_stop_text_is_told(text: Text) -> None:
    ids, stop = text.encode("one STOX two STOP three"), ("STOP",)
    stream, told = TextStream(text, stop), ""
    for count in range(1, len(ids) + 1):
        told += stream.more(ids[:count])
        assert "one STOX two ".startswith(told)
    assert told + stream.end(text.decode_until(ids, stop)) == "one STOX two "
    assert TextStream(text, stop).more(text.encode("one ST")) == "one "


def test_a_stream_is_what_generate_gives(engine: lmoffload.Engine) -> None:
    whole = engine.generate(PROMPTS, temperature=0)
    for prompt, completion in zip(PROMPTS, whole, strict=True):
        pieces = list(engine.stream(prompt, temperature=0))
        assert "".join(pieces) == completion
        assert len(pieces) > 1
    stop = whole[1][3:5]
    assert "".join(engine.stream(PROMPTS[1], temperature=0, stop=[stop])) == whole[1].split(stop)[0]


def test_a_callback(engine: lmoffload.Engine) -> None:
    told = dict.fromkeys(range(len(PROMPTS)), "")
    calls = []

    def hear(place: int, chunk: str) -> None:
        calls.append(place)
        told[place] += chunk

    assert engine.generate(PROMPTS, seed=3, temperature=1.5, on_chunk=hear) == list(told.values())
    assert len(calls) > 2 * len(PROMPTS)


def test_async(engine: lmoffload.Engine) -> None:
    whole = engine.generate(PROMPTS[:1], temperature=0)[0]
    threads = threading.active_count()

    async def hear() -> tuple[str, int]:
        told, beats = "", 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.001)
                beats += 1

        heart = asyncio.create_task(beat())
        async for chunk in engine.stream_async(PROMPTS[0], temperature=0):
            told += chunk
        heart.cancel()
        return told, beats

    told, beats = asyncio.run(hear())
    assert told == whole
    assert beats > 0, "others have their turns meanwhile"
    assert threading.active_count() == threads


def test_a_stream_left_early_leaves_the_engine_ready(engine: lmoffload.Engine) -> None:
    whole = engine.generate(PROMPTS, temperature=0)
    stream = engine.stream(PROMPTS[0], temperature=0)
    first = next(stream)
    with pytest.raises(StatedError, match="at work"):
        engine.generate(PROMPTS)
    with pytest.raises(StatedError, match="at work"):
        next(engine.stream(PROMPTS[1]))
    stream.close()
    assert whole[0].startswith(first)
    assert engine.generate(PROMPTS, temperature=0) == whole

    async def leave() -> str:
        async for chunk in engine.stream_async(PROMPTS[0], temperature=0):
            return chunk
        return ""

    assert asyncio.run(leave()) == first
    assert engine.generate(PROMPTS, temperature=0) == whole


def test_what_cannot_be_streamed_is_told_at_once(engine: lmoffload.Engine) -> None:
    for prompt in ("", "a" * 200):
        with pytest.raises(StatedError):
            engine.stream(prompt)
    with pytest.raises(TypeError):
        engine.stream("a", warmth=3)  # type: ignore[call-arg]
