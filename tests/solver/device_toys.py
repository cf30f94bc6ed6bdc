"""Toys with a device: a machine whose rates are round numbers, and models of few matrices."""

from __future__ import annotations

from lmoffload_solver.accelerator import Accelerator, Rate, RateCurve, Way
from lmoffload_solver.machine import Contention, Link, MachineProfile
from lmoffload_solver.value import Tier
from tests.solver.toys import MIB, curve, make_machine


def make_device_machine(
    device_bytes: int = 4 * MIB,
    host_bytes: int = 64 * MIB,
    *,
    link: float = 1e9,
    disk: float = 1e8,
    host_attention: float = 5e8,
    flops: float = 1e11,
    slowdown: float = 2.0,
    cores: int = 8,
) -> MachineProfile:
    """Device memory of 1e10 bytes/s; a process of 1 MiB."""
    base = make_machine(host_bytes, disk_bytes_per_s=disk, cores=cores, base_bytes=MIB)
    ways: tuple[Way, ...] = ("eager", "fused")
    amounts: tuple[tuple[str, Tier, float], ...] = (
        ("attention_prefill", "device", flops / 2),
        ("attention_decode", "device", 5e9),
        ("attention_decode", "host", host_attention),
        ("quantize", "device", 2e9),
        ("dequantize", "device", 4e9),
        ("quantize", "host", 1e8),
        ("dequantize", "host", 2e8),
    )
    rates = tuple(
        Rate.model_validate({"work": work, "tier": tier, "way": way, "per_s": rate if way == "fused" else rate / 4})
        for work, tier, rate in amounts
        for way in ways
    )
    links = tuple(
        Link(near="device", far="host", direction=direction, page_locked=locked, bytes_per_s=curve((1,), (link if locked else link / 2,)))
        for direction in ("upload", "download")
        for locked in (True, False)
    )
    (measured,) = base.disks
    disk_with_writes = measured.model_copy(update={"write": measured.read[-1:]})
    both = Contention(first="upload", second="host_attention", first_slowdown=slowdown, second_slowdown=slowdown)
    contention = base.model_copy(update={"contention": (both,)})
    overheads = base.overheads.model_copy(update={"layer_s": 1e-6, "step_s": 1e-6, "row_s": 0.0})
    return MachineProfile.model_validate(
        contention.model_dump()
        | {
            "name": "device toy",
            "overheads": overheads.model_dump(),
            "disks": [disk_with_writes.model_dump()],
            "links": [one.model_dump() for one in links],
            "rates": [one.model_dump() for one in rates],
            "accelerator": Accelerator(
                name="toy",
                memory_bytes=device_bytes,
                reserved_bytes=0,
                memory_bytes_per_s=1e10,
                launch_s=1e-7,
                products=RateCurve(rows=(1, 64), flops_per_s=(flops / 8, flops)),
                fused_products_share=0.5,
            ).model_dump(),
        }
    )
