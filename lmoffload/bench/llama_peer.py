"""Peer: llama.cpp, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pydantic import Field

from lmoffload.bench.work import PeerResult, Work
from lmoffload_solver.errors import StatedError
from lmoffload_solver.value import Value, parse_value

CHILD = Path(__file__).with_name("llama_child.py")


class LlamaCppSettings(Value):
    """What a user of llama.cpp may choose."""

    threads: int = Field(gt=0)
    ubatch: int = Field(default=512, gt=0)
    """Tokens computed together at most."""
    flash_attention: bool = True
    repack: bool = True
    """Weights are kept a second time in the layout of its kernels."""
    mmap: bool = True
    unified: bool = False
    """One key-value buffer for all sequences."""


def run_llama_cpp(model: Path, work: Work, settings: LlamaCppSettings, *, python: Path | None = None) -> PeerResult:
    """Have llama.cpp do some work on a GGUF file.

    Args:
        python: an interpreter that has llama-cpp-python; this one by default.

    Raises:
        StatedError: llama-cpp-python is not there, or it failed; the sentence has its last words.
    """
    asked = {"model": str(model), "work": work.model_dump(), "settings": settings.model_dump()}
    done = subprocess.run([str(python or sys.executable), str(CHILD)], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if "No module named 'llama_cpp'" in done.stderr:
        raise StatedError("llama-cpp-python is not installed: pip install llama-cpp-python.")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise StatedError(f"llama.cpp failed: {' '.join(last) or f'exit code {done.returncode}'}.")
    return parse_value(PeerResult, done.stdout, "answer of llama.cpp")
