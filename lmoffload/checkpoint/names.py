"""Shapes by name: configurations of well-known models, as data, for planning without weights and for dummies."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from lmoffload.checkpoint.shape import model_shape
from lmoffload_solver.errors import UsageError
from lmoffload_solver.model import ModelShape

NAMED_FORMAT = "bf16"
"""The stored format of every named shape."""


def named_configs() -> Mapping[str, Mapping[str, Any]]:
    """The configurations of all named shapes, as their config.json would have them."""
    text = resources.files("lmoffload.checkpoint").joinpath("named_shapes.json").read_text(encoding="utf-8")
    configs: dict[str, dict[str, Any]] = json.loads(text)
    return configs


def named_config(name: str) -> Mapping[str, Any]:
    """The configuration of a named shape; upper and lower case are the same.

    Raises:
        UsageError: the name is not known; it gives the closest ones.
    """
    configs = named_configs()
    key = name.strip().lower()
    if key not in configs:
        close = difflib.get_close_matches(key, configs, n=4, cutoff=0.5)
        raise UsageError(f"There is no shape named {name!r}; {'close ones' if close else 'those there'} are {', '.join(close or configs)}.")
    return configs[key]


def named_shape(name: str) -> ModelShape:
    """The shape of a well-known model in bf16, such as "llama-2-70b" or "opt-30b".

    Raises:
        UsageError: the name is not known.
    """
    return model_shape(name.strip().lower(), named_config(name), lambda *_: NAMED_FORMAT, f"shape {name}")
