"""Values of a configuration that only transformers knows: refused in one sentence that blames the right file."""

from __future__ import annotations

import json

import pytest

from lmoffload.checkpoint import load_tokenizer, open_checkpoint
from lmoffload.executor import Engine
from lmoffload_solver.errors import StatedError
from tests.executor.plans import make_plan
from tests.models import tiny_checkpoint


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"hidden_act": "nope"}, "cannot build .*nope"),
        ({"rope_parameters": {"rope_type": "zzz", "rope_theta": 10000.0}}, "cannot build .*zzz"),
        ({"rms_norm_eps": "x"}, "configuration .*rms_norm_eps.*float"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "configuration .*factor"),
    ],
)
def test_values_that_transformers_does_not_know(tmp_path, fields, word):
    folder = tiny_checkpoint("llama", tmp_path / "m", num_layers=1)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | fields
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(StatedError, match=f"(?s){word}") as told:
        Engine(checkpoint, make_plan(checkpoint.shape, checkpoint.fingerprint))
    assert "\n" not in str(told.value)
    if "cannot build" not in word:
        with pytest.raises(StatedError, match=word):
            load_tokenizer(checkpoint)
