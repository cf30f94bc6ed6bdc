"""Random weights in every stored format."""

import torch

from lmoffload.kernels.matrix import Matrix
from lmoffload.kernels.tiled import Codes, is_tiled, pack
from lmoffload.profiler.weights import SCALE_PLACES
from lmoffload_solver.formats import FORMATS, QUANTIZED, stored_bytes

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random_data(format_name: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Stored bytes of weights of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    if format_name in PLAIN:
        return torch.randn(n, k, generator=generator).to(PLAIN[format_name]).view(torch.uint8).flatten()
    if is_tiled(format_name):
        return pack(random_codes(format_name, n, k, generator), format_name)
    fmt, (places, _) = FORMATS[format_name], SCALE_PLACES[format_name]
    blocks = torch.randint(0, 256, (n * k // fmt.block_elements, fmt.block_bytes), generator=generator, dtype=torch.uint8)
    for place in places:
        blocks[:, place : place + 2] = torch.randn(len(blocks), 1, generator=generator).half().view(torch.uint8)
    return blocks.flatten()


def random_codes(format_name: str, n: int, k: int, generator: torch.Generator) -> Codes:
    groups = k // QUANTIZED[format_name].block_elements
    scales = torch.randn(n, groups, generator=generator).half()
    if format_name == "int8":
        return Codes(torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8), scales, None)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    return Codes(codes, scales, torch.randn(n, groups, generator=generator).half())


def random_matrix(format_name: str, n: int, k: int, seed: int = 0, offset: int = 0, row_order: torch.Tensor | None = None) -> Matrix:
    """Such weights beginning `offset` bytes into a buffer."""
    size = stored_bytes((n, k), format_name)
    buffer = torch.empty(offset + size, dtype=torch.uint8)
    buffer[offset:] = random_data(format_name, n, k, seed)
    return Matrix(buffer[offset:], format_name, n, k, row_order)
