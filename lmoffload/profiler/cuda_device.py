"""The CUDA device of this machine, for `device` to measure. Not yet run on a GPU."""

from __future__ import annotations

from lmoffload.profiler.device import Device

WORKSPACE_BYTES = 256 * 2**20
"""What the libraries of products and torch's allocator take beside what is allocated."""


def cuda_device(number: int = 0) -> Device | None:
    """None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", number)
    torch.zeros(1, device=device)  # makes the context, which takes memory
    free, total = torch.cuda.mem_get_info(device)
    return Device(
        torch=device,
        name=torch.cuda.get_device_name(device),
        wait=lambda: torch.cuda.synchronize(device),
        memory_bytes=total,
        free_bytes=free,
        reserved_bytes=total - free + WORKSPACE_BYTES,
    )
