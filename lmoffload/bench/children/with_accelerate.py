"""Accelerate's big-model dispatch at work: whole layers at home in memory while they fit, the others read from the disk when called."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
import transformers
from accelerate.hooks import AlignDevicesHook
from generating import generate_all, set_threads, timed
from peer_protocol import Job, serve


def main(job: Job) -> dict[str, Any]:
    set_threads(job)
    granted = job.settings["cpu_memory"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.asked["model"],
        dtype=job.settings["dtype"],
        device_map="auto",
        max_memory=None if granted is None else {"cpu": granted},
        offload_folder=job.asked["folder"],
    ).eval()
    AlignDevicesHook.pre_forward = timed(job, "loading weights", AlignDevicesHook.pre_forward)
    job.loaded()
    tokens = generate_all(model, job)
    homes = getattr(model, "hf_device_map", {})
    on_disk = sum(home == "disk" for home in homes.values())
    versions = f"accelerate {accelerate.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    return job.answer(tokens, f"{versions}, {torch.get_num_threads()} threads; {on_disk} of {max(1, len(homes))} modules on the disk")


if __name__ == "__main__":
    serve(main)
