"""The processor's name and instruction sets, and the versions of what was measured with."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from lmoffload_solver.machine import Processor

TOLD = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile",
    "amx_bf16", "amx_int8", "asimd", "asimddp", "fphp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""Instruction sets that products of matrices may use, as the kernel names them."""
PACKAGES = ("lmoffload", "torch", "transformers", "llvmlite", "numpy", "scipy", "greenlet")


def host_processor(cores: int, root: Path = Path("/")) -> Processor:
    """The processor at the host tier."""
    fields: dict[str, str] = {}
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return Processor(tier="host", name=name, cores=cores, instruction_sets=tuple(flag for flag in TOLD if flag in flags))


def versions() -> dict[str, str]:
    """Versions of Python, of the kernel and of the packages that decide speed."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
