"""Sampling from the command line and from lines: options, log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, make_model


def _results(text: str) -> dict[str, dict[str, Any]]:
    return {result["id"]: result for result in map(json.loads, text.splitlines())}


def test_a_lines_own_options_win(call: Call, profiled: Path, model: Path) -> None:
    lines = [
        {"id": "greedy", "prompt": "One two", "temperature": 0},
        {"id": "one", "prompt": "One two", "top_k": 1},
        {"id": "likely", "prompt": "One two", "min_p": 1.0},
        {"id": "penalty", "prompt": "One two", "temperature": 0, "repetition_penalty": 1e20},
        {"id": "hot", "prompt": "One two"},
    ]
    Path("job.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = call("run", model, "--input", "job.jsonl", "--gen-len", "12", "--temperature", "5", "--seed", "1", "--logprobs")
    assert shown.code == 0, shown.err
    tokens = {key: result["token_ids"] for key, result in _results(shown.out).items()}
    assert tokens["one"] == tokens["likely"] == tokens["greedy"] != tokens["hot"]
    assert len(set(tokens["penalty"])) == 12, "nothing comes twice"
    for result in _results(shown.out).values():
        assert len(result["log_probabilities"]) == 12
        assert all(value <= 0 for value in result["log_probabilities"])


def test_log_probabilities_are_told_when_asked_alone(call: Call, profiled: Path, model: Path) -> None:
    work = ("--num-prompts", "2", "--prompt-len", "5", "--gen-len", "3")
    plain = _results(call("run", model, *work).out)
    told = _results(call("run", model, *work, "--logprobs").out)
    assert all("log_probabilities" not in result for result in plain.values())
    assert {key: {**result, "log_probabilities": told[key]["log_probabilities"]} for key, result in plain.items()} == told


def test_the_models_own_stop_texts(call: Call, profiled: Path, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "own")
    work = ("run", folder, "-p", "One two", "--gen-len", "12", "--temperature", "0")
    whole = call(*work).out.removesuffix("\n")
    for stated in (whole[4:6], ["never there", whole[4:6]]):
        (folder / "generation_config.json").write_text(json.dumps({"stop_strings": stated}))
        assert call(*work).out == whole.partition(whole[4:6])[0] + "\n"
    assert call(*work, "--stop", whole[7:9]).out == whole.partition(whole[7:9])[0] + "\n", "the request wins"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--min-p", "1.5"], "min-p is 1.5"),
        (["--repetition-penalty", "0"], "repetition penalty is 0"),
        (["--repetition-penalty", "nan"], "repetition penalty is nan"),
        (["-p", "a", "--logprobs"], "--logprobs"),
    ],
)
def test_wrong_options(call: Call, profiled: Path, model: Path, options: list[str], word: str) -> None:
    shown = call("run", model, *options)
    assert (shown.code, shown.out, len(shown.err.splitlines())) == (2, "", 1)
    assert word in shown.err
