"""AirLLM at work: the checkpoint split into a file per layer, each layer read when it is called and dropped after it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import airllm
import torch
import transformers
from generating import generate_all, set_threads
from peer_protocol import Job, serve


def main(job: Job) -> dict[str, Any]:
    set_threads(job)
    dtype = None if job.settings["dtype"] == "auto" else getattr(torch, job.settings["dtype"])
    model = airllm.AutoModel.from_pretrained(
        job.asked["model"],
        device="cpu",
        dtype=dtype,
        layer_shards_saving_path=job.asked["folder"],
        prefetching=job.settings["prefetching"],
    )
    job.loaded()
    tokens = generate_all(model.model, job)
    versions = f"airllm {version('airllm')}, transformers {transformers.__version__}, torch {torch.__version__}"
    return job.answer(tokens, f"{versions}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    serve(main)
