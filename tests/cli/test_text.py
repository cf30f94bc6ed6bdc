"""Text to tokens: exactly one start token (case G5), one sentence where there is no template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmoffload.checkpoint import open_checkpoint
from lmoffload.checkpoint.dummy_tokenizer import BOS_ID, EOS_ID
from lmoffload.errors import StatedError
from lmoffload.jobs.text import Text
from tests.cli.conftest import CHAT_TEMPLATE, make_model

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def plain(model: Path) -> Text:
    return Text(open_checkpoint(model))


@pytest.fixture(scope="module")
def adding(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A tokenizer that itself adds the start token."""
    folder = make_model(tmp_path_factory.mktemp("adding") / "model")
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(document), encoding="utf-8")
    return Text(open_checkpoint(folder))


def test_raw_text_has_the_start_token_that_the_tokenizer_adds(plain: Text, adding: Text) -> None:
    assert plain.encode("Hello").count(BOS_ID) == 0
    assert adding.encode("Hello")[0] == BOS_ID
    assert adding.encode("Hello").count(BOS_ID) == 1
    assert adding.encode("<s>Hello") == adding.encode("Hello")


def test_a_template_that_renders_the_start_token_has_it_once(plain: Text, adding: Text) -> None:
    assert CHAT_TEMPLATE.startswith("{{ '<s>' }}")
    for text in (plain, adding):
        ids = text.encode_chat(MESSAGES)
        assert ids[0] == BOS_ID
        assert ids.count(BOS_ID) == 1
        assert text.decode(ids) == "[user] Hello\n[assistant]"


def test_no_template_is_told(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "untaught")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(StatedError, match="The model untaught has no chat template"):
        Text(open_checkpoint(folder)).encode_chat(MESSAGES)


def test_a_template_that_refuses_is_told(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "strict")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "{{ raise_exception('System role not supported') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(StatedError, match="refuses the messages: System role not supported"):
        Text(open_checkpoint(folder)).encode_chat(MESSAGES)


def test_empty_prompts_are_told(plain: Text, adding: Text) -> None:
    with pytest.raises(StatedError, match="The prompt is empty"):
        plain.encode("")
    assert adding.encode("") == (BOS_ID,)


def test_completions_end_before_the_first_stop_text(plain: Text) -> None:
    ids = plain.encode("one, two. three")
    assert plain.decode_until(ids, ()) == "one, two. three"
    assert plain.decode_until(ids, (".", ",")) == "one"
    assert plain.decode_until(ids, ("four",)) == "one, two. three"
    assert plain.end_token_id == EOS_ID
