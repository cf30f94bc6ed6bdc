"""llama.cpp at work, through llama-cpp-python's low-level interface: all sequences of a batch in one context."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as api
import numpy as np
from peer_protocol import Job, serve


class Context:
    """A model loaded, and room for the sequences of a batch."""

    def __init__(self, path: str, settings: dict[str, Any], num_sequences: int, longest: int) -> None:
        api.llama_backend_init()
        wanted = api.llama_model_default_params()
        wanted.n_gpu_layers = 0
        if hasattr(wanted, "load_mode"):
            wanted.load_mode = api.LLAMA_LOAD_MODE_MMAP if settings["mmap"] else api.LLAMA_LOAD_MODE_NONE
        else:  # before llama-cpp-python 0.3.30 or so
            wanted.use_mmap = settings["mmap"]
        wanted.use_extra_bufts = settings["repack"]
        self.model = api.llama_model_load_from_file(path.encode(), wanted)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        options = api.llama_context_default_params()
        options.n_ctx = num_sequences * longest
        options.n_seq_max = num_sequences
        options.kv_unified = settings["unified"]
        options.n_batch = options.n_ctx
        options.n_ubatch = settings["ubatch"]
        options.n_threads = options.n_threads_batch = settings["threads"]
        options.flash_attn_type = int(settings["flash_attention"])
        self.context = api.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context of these settings")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(options.n_ctx, 0, 1)

    def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, place, sequence, whether its logits are wanted); the likeliest next tokens of those wanted."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, place, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, place, 1, wanted
            batch.seq_id[i][0] = sequence
        failed = api.llama_decode(self.context, batch)
        if failed:
            raise RuntimeError(f"llama_decode fails with {failed}")
        wanted_places = [i for i, (*_, wanted) in enumerate(tokens) if wanted]
        logits = (np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.vocab_size,)) for i in wanted_places)
        return [int(row.argmax()) for row in logits]

    def forget(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), False)


def complete(context: Context, prompts: list[list[int]], job: Job) -> list[list[int]]:
    """All prompts of a batch at once: the tokens of each."""
    context.forget()
    rows = [(token, at, i, at == len(prompt) - 1) for i, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
    found = [context.decode(rows)]
    job.token()
    for step in range(job.gen_len - 1):
        begin, watched = time.perf_counter(), job.watched
        found.append(context.decode([(token, len(prompts[i]) + step, i, True) for i, token in enumerate(found[-1])]))
        if watched:
            job.span("llama_decode", "all layers", begin, time.perf_counter())
        job.token()
    return [list(row) for row in zip(*found, strict=True)]


def main(job: Job) -> dict[str, Any]:
    longest = max(map(len, job.prompts)) + job.gen_len
    context = Context(job.asked["model"], job.settings, job.settings.get("batch") or len(job.prompts), longest)
    job.loaded()
    tokens: list[list[int]] = []
    for _ in range(job.asked["repeats"]):
        job.begin()
        tokens = [row for batch in job.batches() for row in complete(context, batch, job)]
    return job.answer(tokens, f"llama-cpp-python {api.__version__}: {api.llama_print_system_info().decode().strip()}")


if __name__ == "__main__":
    serve(main)
