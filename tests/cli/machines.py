"""A machine made by hand, so that command line tests need not measure one."""

from __future__ import annotations

from lmoffload_solver.machine import (
    AttentionCurve,
    Curve,
    Disk,
    Fit,
    HostLimits,
    LinearCurve,
    MachineProfile,
    MemoryRate,
    Overheads,
    Processor,
    TransferCurve,
)

KERNEL_OF = {"fp32": "fp32"} | dict.fromkeys(("bf16", "fp16", "q8_0", "q4_0", "q4_1"), "widen_tiles")
THREADS = (1, 2)


def curve(*points: tuple[float, float], fit: Fit | None = None) -> Curve:
    """A steady curve through points (x, rate)."""
    return Curve(x=tuple(x for x, _ in points), y=tuple(y for _, y in points), spread=(0.02,) * len(points), fit=fit)


def machine(name: str = "by-hand", file_system: str = "/", cores: int = 2, memory_bytes: int = 16 * 2**30) -> MachineProfile:
    """1 GB/s of disk, 20 GFLOP/s a thread for wide products."""
    return MachineProfile(
        name=name,
        provenance="made by hand for a test; not measured",
        host=HostLimits(
            memory_total_bytes=memory_bytes,
            memory_usable_bytes=memory_bytes,
            memory_limited_by="physical",
            cores=cores,
            cores_limited_by="physical",
            last_level_cache_bytes=32 * 2**20,
        ),
        processors=(Processor(tier="host", name="by hand", cores=cores),),
        memory=tuple(MemoryRate(tier="host", threads=n, bytes_per_s=10e9 * n, spread=0.01) for n in THREADS),
        disks=(
            Disk(
                file_system=file_system,
                device="by-hand",
                read=tuple(
                    TransferCurve(threads=n, bytes_per_s=curve((2**16, 3e8), (2**20, 8e8), (2**26, 1e9), fit=_latency()))
                    for n in (1, 2, 4)
                ),
                direct=True,
                cache_excluded=True,
                free_bytes=2**40,
                random_write_s=1e-4,
            ),
        ),
        linear=tuple(
            LinearCurve(
                kernel=kernel, format=fmt, threads=n, n=1024, k=1024, flops_per_s=curve((1, 2e9 * n), (16, 1e10 * n), (256, 2e10 * n))
            )
            for fmt, kernel in KERNEL_OF.items()
            for n in THREADS
        ),
        attention=tuple(
            AttentionCurve(phase=phase, format="fp32", threads=n, rate=curve((16, rate * n), (1024, rate * n)))
            for phase, rate in (("prefill", 1e10), ("decode", 5e9))
            for n in THREADS
        ),
        overheads=Overheads(
            layer_s=4e-4, step_s=1e-3, row_s=1e-4, linear_call_s={1: 3e-5}, elementwise_bytes_per_s=5e9, random_read_s=1e-4
        ),
        base_bytes=400 * 2**20,
    )  # fmt: skip


def _latency() -> Fit:
    return Fit(latency_s=1e-4, rate_per_s=1e9, residual=0.01)
