"""FlexgenConstants: what FlexGen's own model knows of a machine."""

from __future__ import annotations

from pydantic import Field

from lmoffload_solver.value import Value

GIB = 2**30
"""What FlexGen calls a GB."""
TERA = 1e12


class FlexgenConstants(Value):
    """The fitted constants of a machine in FlexGen's model, its memories and its capacity rule."""

    ctog_bytes_per_s: float = Field(gt=0)
    gtoc_cache_bytes_per_s: float = Field(gt=0)
    gtoc_hidden_bytes_per_s: float = Field(gt=0)
    dtoc_bytes_per_s: float = Field(gt=0)
    ctod_cache_prefill_bytes_per_s: float = Field(gt=0)
    ctod_hidden_prefill_bytes_per_s: float = Field(gt=0)
    ctod_decode_bytes_per_s: float = Field(gt=0)
    mm_prefill_flops_per_s: float = Field(gt=0)
    """Products with weights on the GPU."""
    mm_decode_flops_per_s: float = Field(gt=0)
    bmm_prefill_flops_per_s: float = Field(gt=0)
    """Batched products of attention on the GPU."""
    bmm_decode_flops_per_s: float = Field(gt=0)
    cpu_flops_per_s: float = Field(gt=0)
    """Attention on the CPU, before the correction by c1, c2, c3."""
    c1: float
    c2: float
    c3: float
    dtoc_weights_share: float = Field(gt=0, le=1)
    """Part of dtoc that weights get in a decode step."""
    capacity_share: float = Field(gt=0)
    """Part of each memory that a policy may fill."""
    gpu_bytes: float = Field(ge=0)
    cpu_bytes: float = Field(ge=0)
    disk_bytes: float = Field(ge=0)

    def with_disk(self, dtoc_bytes_per_s: float) -> FlexgenConstants:
        """The same machine with a disk read at another rate."""
        return self.model_copy(update={"dtoc_bytes_per_s": dtoc_bytes_per_s})


def published_constants() -> FlexgenConstants:
    """The constants that FlexGen ships, fitted by its authors to a Google Cloud T4 (class CostModelConfig, and alpha_g, alpha_c, alpha_n).

    Its disk constant, 0.473 GiB/s, does not match the disk of the published runs, which about 2.6 GiB/s does: see `with_disk`.
    """
    return FlexgenConstants(
        ctog_bytes_per_s=12.89 * GIB,
        gtoc_cache_bytes_per_s=0.97 * GIB,
        gtoc_hidden_bytes_per_s=4.82 * GIB,
        dtoc_bytes_per_s=0.473 * GIB,
        ctod_cache_prefill_bytes_per_s=0.746 * GIB,
        ctod_hidden_prefill_bytes_per_s=2.015 * GIB,
        ctod_decode_bytes_per_s=2.015 * GIB,
        mm_prefill_flops_per_s=21.24 * TERA,
        mm_decode_flops_per_s=4.3 * TERA,
        bmm_prefill_flops_per_s=9.97 * TERA,
        bmm_decode_flops_per_s=0.079 * TERA,
        cpu_flops_per_s=0.0123 * TERA,
        c1=0.0168,
        c2=0.0328,
        c3=0.0621,
        dtoc_weights_share=0.95,
        capacity_share=0.8,
        gpu_bytes=15 * GIB,
        cpu_bytes=204 * GIB,
        disk_bytes=1500 * GIB,
    )
