"""A transformers model at work: `generate`, stamped after every token. What systems built on transformers share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from peer_protocol import Job


def set_threads(job: Job) -> None:
    """torch's own choice where the setting is None."""
    if job.settings["threads"] is not None:
        torch.set_num_threads(job.settings["threads"])


def generate_all(model: Any, job: Job) -> list[list[int]]:
    """Greedy tokens of every prompt, batch by batch, shorter prompts padded on the left; no token ends a text early."""
    tokens: list[list[int]] = []
    watch_layers(model, job)
    for _ in range(job.asked["repeats"]):
        job.begin()
        tokens = [row for batch in job.batches() for row in _generate(model, batch, job)]
    return tokens


def _generate(model: Any, prompts: list[list[int]], job: Job) -> list[list[int]]:
    from transformers import GenerationConfig, StoppingCriteriaList

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def stamp(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        job.token()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    greedy = GenerationConfig(max_new_tokens=job.gen_len, do_sample=False, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=mask, generation_config=greedy, stopping_criteria=StoppingCriteriaList([stamp]))
    return [[int(token) for token in row[longest:]] for row in found]


def watch_layers(model: Any, job: Job) -> None:
    """Tell when each decoder layer of the watched step begins and ends, what it waits for included."""
    layers = next((m for name, m in model.named_modules() if name.endswith("layers") and isinstance(m, torch.nn.ModuleList)), ())
    for number, layer in enumerate(layers):
        begin: list[float] = []

        def before(*_: Any, begin: list[float] = begin) -> None:
            begin[:] = [time.perf_counter()] if job.watched else []

        def after(*_: Any, begin: list[float] = begin, number: int = number) -> None:
            if begin and job.watched:
                job.span("layers", f"layer {number}", begin[0], time.perf_counter())

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def timed(job: Job, lane: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose calls in the watched step are told."""

    def call(*arguments: Any, **named: Any) -> Any:
        begin, watched = time.perf_counter(), job.watched
        try:
            return function(*arguments, **named)
        finally:
            if watched:
                job.span(lane, "", begin, time.perf_counter())

    return call
