"""From logits to the next token of each row, by transformers' own logits processors."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lmoffload.executor.request import Request, Sampling
from lmoffload_solver.errors import StatedError

LEAST_TEMPERATURE = 1e-30
"""Below it the likeliest token has all the probability that fp32 can tell, and logits divided by it would overflow: it is greedy."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one row's next token is chosen."""

    processors: Any
    """A transformers LogitsProcessorList, or None when greedy without penalties."""
    generator: torch.Generator | None
    """None when greedy."""

    @property
    def plain(self) -> bool:
        """The likeliest token, whatever came before."""
        return self.processors is None and self.generator is None

    @staticmethod
    def of(request: Request, defaults: Mapping[str, Any], vocab_size: int) -> Sampler:
        """The request's own wishes, over the model's generation configuration (`defaults`).

        Raises:
            StatedError: a setting has no meaning (a negative temperature, a top_p outside 0 to 1).
        """
        wished = request.sampling
        temperature, top_p, top_k = _resolve(wished, defaults)
        penalty = float(defaults.get("repetition_penalty") or 1.0)
        greedy = temperature <= LEAST_TEMPERATURE
        processors = _processors(penalty, None if greedy else temperature, top_p, min(top_k, vocab_size))
        generator = None if greedy else _generator(wished.seed, request.id)
        return Sampler(processors if len(processors) else None, generator)

    def next_token(self, logits: torch.Tensor, tokens: list[int]) -> int:
        """The next token from one row's logits [vocabulary] and the tokens before it."""
        if self.processors is not None:
            logits = self.processors(torch.tensor([tokens]), logits.unsqueeze(0).clone())[0]
        if self.generator is None:
            return int(torch.argmax(logits))
        return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=self.generator))


def _resolve(wished: Sampling, defaults: Mapping[str, Any]) -> tuple[float, float, int]:
    """(temperature, top_p, top_k); temperature 0 is greedy, top_k 0 is off. The request wins over the model's file."""
    asked = any(value is not None for value in (wished.temperature, wished.top_p, wished.top_k))
    samples = bool(defaults.get("do_sample")) or asked
    default = defaults if defaults.get("do_sample") else {}
    temperature = wished.temperature if wished.temperature is not None else float(default.get("temperature") or 1.0)
    top_p = wished.top_p if wished.top_p is not None else float(default.get("top_p") or 1.0)
    top_k = wished.top_k if wished.top_k is not None else int(default.get("top_k") or 0)
    if temperature < 0:
        raise StatedError(f"The temperature is {temperature}; it must be 0 (greedy) or more.")
    if not 0 <= top_p <= 1:
        raise StatedError(f"top_p is {top_p}; it must be between 0 and 1.")
    if top_k < 0:
        raise StatedError(f"top_k is {top_k}; it must be 0 (off) or more.")
    return (temperature if samples else 0.0), top_p, top_k


def _processors(penalty: float, temperature: float | None, top_p: float, top_k: int) -> Any:
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if temperature is not None:
        if temperature != 1.0:
            processors.append(TemperatureLogitsWarper(temperature))
        if top_k:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p))
    return processors


def _generator(seed: int | None, request_id: str) -> torch.Generator:
    """Random numbers of a row: from the seed and the row's id, so that no batch composition changes them."""
    text = f"{secrets.randbits(64) if seed is None else seed}:{request_id}"
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def stop_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None = None) -> frozenset[int]:
    """Tokens that end a row: of the generation configuration, else of the model's, else of the tokenizer."""
    for place in (generation, config):
        ids = place.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset() if tokenizer_eos is None else frozenset([tokenizer_eos])
