"""What transformers itself gives for a prompt alone, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PROMPT_LENGTHS = (3, 17, 9, 30, 1, 5, 40, 12)


def prompts(vocab_size: int, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def load_reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The prompt's greedy continuation by `generate`, end token included."""
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()
