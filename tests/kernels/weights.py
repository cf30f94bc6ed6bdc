"""Random weights in every stored format."""

import torch

from lmoffload.kernels.matrix import Matrix
from lmoffload_solver.formats import FORMATS, stored_bytes

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random_data(format_name: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Stored bytes of weights of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    if format_name in PLAIN:
        return torch.randn(n, k, generator=generator).to(PLAIN[format_name]).view(torch.uint8).flatten()
    size, scales = FORMATS[format_name].block_bytes, 4 if format_name == "q4_1" else 2
    blocks = torch.randint(0, 256, (n * k // 32, size), generator=generator, dtype=torch.uint8)
    blocks[:, :scales] = torch.randn(n * k // 32, scales // 2, generator=generator).half().view(torch.uint8)
    return blocks.flatten()


def random_matrix(format_name: str, n: int, k: int, seed: int = 0, offset: int = 0, row_order: torch.Tensor | None = None) -> Matrix:
    """Such weights beginning `offset` bytes into a buffer."""
    size = stored_bytes((n, k), format_name)
    buffer = torch.empty(offset + size, dtype=torch.uint8)
    buffer[offset:] = random_data(format_name, n, k, seed)
    return Matrix(buffer[offset:], format_name, n, k, row_order)
