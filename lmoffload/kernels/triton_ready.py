"""Whether Triton's kernels can run on a device."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def triton_runs_on(device: torch.device) -> bool:
    """On the CPU they run in Triton's interpreter alone, which tests call for themselves."""
    return device.type != "cpu" and _installed()
