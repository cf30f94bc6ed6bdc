"""What CUDA devices there are, by name."""

from __future__ import annotations


def device_names() -> tuple[str, ...]:
    """In the order of their numbers; none where torch finds none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.cuda.get_device_name(number) for number in range(count))
