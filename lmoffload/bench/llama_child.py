"""llama.cpp at work: one job of token ids in one process, through llama-cpp-python's low-level interface.

Run as a program of its own (`python llama_child.py`), by any interpreter that has llama_cpp: it imports nothing of lmoffload, whose
memory would count as llama.cpp's. One JSON object on standard input (`llama_peer.run_llama_cpp` says which), one on standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as api
import numpy as np


class Context:
    """A model loaded, and room for the sequences of a job."""

    def __init__(self, path: str, settings: dict[str, Any], num_sequences: int, longest: int) -> None:
        api.llama_backend_init()
        wanted = api.llama_model_default_params()
        wanted.n_gpu_layers = 0
        wanted.load_mode = api.LLAMA_LOAD_MODE_MMAP if settings["mmap"] else api.LLAMA_LOAD_MODE_NONE
        wanted.use_extra_bufts = settings["repack"]
        self.model = api.llama_model_load_from_file(path.encode(), wanted)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
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
            raise SystemExit("llama.cpp cannot make a context of these settings")
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
            raise SystemExit(f"llama_decode fails with {failed}")
        wanted_places = [i for i, (*_, wanted) in enumerate(tokens) if wanted]
        logits = (np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.vocab_size,)) for i in wanted_places)
        return [int(row.argmax()) for row in logits]

    def forget(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), False)


def run(context: Context, prompts: list[list[int]], gen_len: int) -> tuple[dict[str, float], list[list[int]]]:
    """All prompts at once: the times, and the tokens of each."""
    context.forget()
    start = time.perf_counter()
    rows = [(token, at, i, at == len(prompt) - 1) for i, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
    found = [context.decode(rows)]
    prefilled = time.perf_counter()
    for step in range(gen_len - 1):
        found.append(context.decode([(token, len(prompts[i]) + step, i, True) for i, token in enumerate(found[-1])]))
    end = time.perf_counter()
    return {"prefill_s": prefilled - start, "decode_s": end - prefilled}, [list(row) for row in zip(*found, strict=True)]


def peak_resident_bytes() -> int:
    """As the kernel tells it; `getrusage` would tell the parent's where that was more."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def main() -> None:
    asked = json.load(sys.stdin)
    work, start = asked["work"], time.perf_counter()
    longest = max(map(len, work["prompts"])) + work["gen_len"]
    context = Context(asked["model"], asked["settings"], len(work["prompts"]), longest)
    load_s = time.perf_counter() - start
    times: list[dict[str, float]] = []
    tokens: list[list[int]] = []
    for _ in range(work["repeats"]):
        taken, tokens = run(context, work["prompts"], work["gen_len"])
        times.append(taken)
    answer = {
        "token_ids": tokens,
        "times": times,
        "load_s": load_s,
        "peak_rss_bytes": peak_resident_bytes(),
        "about": f"llama-cpp-python {api.__version__}: {api.llama_print_system_info().decode().strip()}",
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
