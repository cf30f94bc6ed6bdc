"""From logits to the next token of each row, by transformers' own logits processors."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lmoffload.executor.request import Request, Sampling
from lmoffload_solver.errors import StatedError

LEAST_TEMPERATURE = 1e-30
"""Below it the likeliest token has all the probability that fp32 can tell, and logits divided by it would overflow: it is greedy."""

LARGEST = 1e30
"""Logits multiplied by a larger repetition penalty would not be finite."""


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
        wished = _resolved(request.sampling, defaults)
        _check(wished)
        assert wished.temperature is not None
        greedy = wished.temperature <= LEAST_TEMPERATURE
        processors = _processors(wished, vocab_size, greedy)
        generator = None if greedy else _generator(wished.seed, request.id)
        return Sampler(processors if len(processors) else None, generator)

    def next_token(self, logits: torch.Tensor, tokens: list[int]) -> int:
        """The next token from one row's logits [vocabulary] and the tokens before it."""
        if self.processors is not None:
            logits = self.processors(torch.tensor([tokens]), logits.unsqueeze(0).clone())[0]
        if self.generator is None:
            return int(torch.argmax(logits))
        return int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=self.generator))


def _resolved(wished: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    """Every setting has a value, but for the seed; temperature 0 is greedy, top_k 0 is off. The request wins over the model's file."""
    asked = any(value is not None for value in (wished.temperature, wished.top_p, wished.top_k, wished.min_p))
    samples = bool(defaults.get("do_sample"))
    default = defaults if samples else {}
    filed = Sampling(
        temperature=float(default.get("temperature") or 1.0) if samples or asked else 0.0,
        top_p=float(default.get("top_p") or 1.0),
        top_k=int(default.get("top_k") or 0),
        min_p=float(default.get("min_p") or 0.0),
        repetition_penalty=float(defaults.get("repetition_penalty") or 1.0),
    )
    return wished.over(filed)


def _check(wished: Sampling) -> None:
    """The least that each may be, and the most."""
    bounds = {"temperature": math.inf, "top_p": 1, "top_k": math.inf, "min_p": 1, "repetition_penalty": LARGEST}
    for name, most in bounds.items():
        value = getattr(wished, name)
        if not 0 <= value <= most or (name == "repetition_penalty" and not value):
            least = "more than 0" if name == "repetition_penalty" else "0 or more"
            raise StatedError(f"The setting {name} is {value}; it must be {least}" + (" and at most 1." if most == 1 else "."))


def _processors(wished: Sampling, vocab_size: int, greedy: bool) -> Any:
    """In transformers' own order."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    assert wished.temperature is not None and wished.top_p is not None and wished.repetition_penalty is not None
    processors = LogitsProcessorList()
    if wished.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(wished.repetition_penalty))
    if greedy:
        return processors
    if wished.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(wished.temperature))
    if wished.top_k:
        processors.append(TopKLogitsWarper(min(wished.top_k, vocab_size)))
    if wished.top_p < 1.0:
        processors.append(TopPLogitsWarper(wished.top_p))
    if wished.min_p:
        processors.append(MinPLogitsWarper(wished.min_p))
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
