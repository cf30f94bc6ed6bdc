"""ZeRO-Inference at work: DeepSpeed's stage 3 with the parameters on the CPU or on NVMe.

The configuration is that of DeepSpeedExamples' `inference/huggingface/zero_inference/run_model.py`; what it fixes there are settings here.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import transformers
from generating import generate_all, set_threads
from peer_protocol import Job, serve
from transformers.integrations.deepspeed import HfDeepSpeedConfig


def configuration(job: Job) -> dict[str, Any]:
    """DeepSpeed's, of the settings."""
    settings, facts = job.settings, job.asked
    offload: dict[str, Any] = {"device": settings["parameters_on"], "pin_memory": settings["pin_memory"]}
    if settings["parameters_on"] == "nvme":
        offload |= {"nvme_path": facts["folder"], "buffer_count": settings["buffer_count"], "buffer_size": facts["largest_elements"]}
    return {
        "bf16": {"enabled": settings["dtype"] == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": settings["prefetch_bucket"],
            "stage3_param_persistence_threshold": settings["persistence_threshold"],
            "stage3_max_live_parameters": max(settings["prefetch_bucket"], facts["largest_elements"]),
            "offload_param": offload,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "thread_count": settings["aio_threads"],
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 1 << 30,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }


def main(job: Job) -> dict[str, Any]:
    set_threads(job)
    place = f"file://{job.asked['folder']}/rendezvous"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=place, rank=0, world_size=1, verbose=False)
    config = configuration(job)
    keep = HfDeepSpeedConfig(config)  # tells transformers to place parameters while it loads them, as long as it lives
    dtype = torch.bfloat16 if job.settings["dtype"] == "bfloat16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(job.asked["model"], dtype=dtype)
    engine = deepspeed.initialize(model=model.eval(), config=config)[0]
    engine.module.eval()
    job.loaded()
    tokens = generate_all(engine.module, job)
    versions = f"deepspeed {deepspeed.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    assert keep.is_zero3()
    return job.answer(tokens, f"{versions}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    serve(main)
