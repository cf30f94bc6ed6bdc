"""Tiny checkpoints, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from lmoffload.checkpoint import Checkpoint, open_checkpoint
from tests.models import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """tiny(family, num_layers=4, dtype="fp32", ...) opens a tiny checkpoint, made at the first call."""

    @cache
    def make(family: str, **options: Any) -> Checkpoint:
        return open_checkpoint(tiny_checkpoint(family, tmp_path_factory.mktemp(family) / "model", **options))

    return make
